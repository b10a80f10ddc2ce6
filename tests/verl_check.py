"""Runs beside verl: composes jobs by its Hydra configuration and runs its checks."""

import json
import sys
import warnings

warnings.simplefilter("ignore")

from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

SECTIONS = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "algorithm",
)  # which verl makes dataclasses of


def flat(tree, prefix=""):
    found = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def values_of(config):
    return flat(OmegaConf.to_container(config, resolve=False))


def checked(job, defaults):
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = compose(job["config_name"], overrides=job["overrides"])
    changed = {
        name: value for name, value in values_of(config).items() if defaults.get(name, "") != value
    }
    OmegaConf.to_container(config, resolve=True)  # every reference has a value
    uses_reference = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    validate_config(config=config, use_reference_policy=uses_reference, use_critic=False)
    for name in SECTIONS:
        omega_conf_to_dataclass(OmegaConf.select(config, name))
    return {"changed": changed}


def scored(config, calls):
    """What the configured reward function says, loaded by verl."""
    from verl.trainer.ppo.reward import get_custom_reward_fn

    function = get_custom_reward_fn(config)
    return [function(**call) for call in calls]


def first_row(config, tokenizer_folder):
    """The number of rows that verl reads, and what it takes of the first."""
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset

    dataset = RLHFDataset(
        config.data.train_files, AutoTokenizer.from_pretrained(tokenizer_folder), config.data
    )
    row = dataset[0]
    kept = {
        name: row[name]
        for name in ("data_source", "reward_model", "extra_info", "index", "ability")
    }
    return {"number": len(dataset), **kept}


def import_with_older_names():
    """verl before 0.8 imports a class that newer transformers call otherwise; no configuration uses
    it.
    """
    import transformers

    if not hasattr(transformers, "AutoModelForVision2Seq"):
        transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText


def main():
    import_with_older_names()
    given, results = json.load(sys.stdin), {}
    jobs, asked = given["jobs"], given["asked"]
    with initialize_config_dir(sys.argv[1], version_base=None):
        defaults = {
            name: values_of(compose(name)) for name in {job["config_name"] for job in jobs.values()}
        }
        for name, job in jobs.items():
            try:
                results[name] = checked(job, defaults[job["config_name"]])
            except Exception as error:  # noqa: BLE001  whatever verl says of a job is its result
                results[name] = {"error": f"{type(error).__name__}: {error}"}
        if asked:
            config = compose(asked["config_name"], overrides=asked["overrides"])
            results["scored"] = scored(config, asked["calls"])
            results["first row"] = first_row(config, asked["tokenizer"])
    sys.stdout.write(json.dumps(results) + "\n")


main()

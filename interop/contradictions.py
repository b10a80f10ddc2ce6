"""Settings of another trainer that contradict each other."""

from __future__ import annotations

from interop.theirs import Theirs

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"


def contradictions(theirs: Theirs) -> dict[str, str]:
    """By key, why it contradicts another that is set as well, or a default of the trainer."""
    if theirs.table.trainer != "verl":
        return {}
    return _of_loss(theirs) | _of_micro_batches(theirs) | _of_batches(theirs) | _of_places(theirs)


def _of_loss(theirs: Theirs) -> dict[str, str]:
    in_loss, in_reward = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    if theirs[in_loss] is not True or theirs[in_reward] is not True:
        return {}
    why = f"{in_loss} and {in_reward} are both on; algorithm.kl.place has one of loss and reward"
    return {in_loss: why, in_reward: why}


def _of_micro_batches(theirs: Theirs) -> dict[str, str]:
    dynamic, tokens = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    sizes = [f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size"]
    given = [name for name in sizes if theirs.is_set(name) and theirs[name] is not None]
    if len(given) == 2:
        return dict.fromkeys(given, f"{given[0]} and {given[1]} are both set; keep one")
    if theirs[dynamic] is not True:
        return {}
    if given and theirs.is_set(dynamic) and not theirs.is_set(tokens):
        why = (
            f"{dynamic} is on, so that {given[0]} is read nowhere, and {tokens}, which counts instead, is not set"
        )
        return {dynamic: why, given[0]: why}
    is_megatron = theirs[f"{ACTOR}.strategy"] == "megatron"
    ranks = theirs[f"{ACTOR}.{'megatron.context' if is_megatron else 'ulysses_sequence'}_parallel_size"] or 1
    lengths = theirs["data.max_prompt_length"], theirs["data.max_response_length"]
    numbers = (theirs[tokens], ranks, *lengths)
    if theirs.is_set(tokens) and all(type(number) is int for number in numbers):
        room, longest = theirs[tokens] * ranks, sum(lengths)
        if room < longest:
            return {
                tokens: f"{theirs[tokens]} tokens on each of {ranks} ranks hold no sequence of {longest}; set "
                f"{-(-longest // ranks)}"
            }
    return {}


def _of_batches(theirs: Theirs) -> dict[str, str]:
    step, mini = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"
    sizes = theirs[step], theirs[mini]
    if not (theirs.is_set(step) or theirs.is_set(mini)) or not all(type(size) is int for size in sizes):
        return {}
    if sizes[0] >= sizes[1]:
        return {}
    why = f"{step}={sizes[0]} prompts a step are fewer than {mini}={sizes[1]} of an optimizer step"
    return {name: why for name in (step, mini) if theirs.is_set(name)}


def _of_places(theirs: Theirs) -> dict[str, str]:
    found: dict[str, str] = {}
    actor, ref = f"{ACTOR}.strategy", f"{REF}.strategy"
    fsdp = ("fsdp", "fsdp2")
    if theirs.is_set(actor) and theirs.is_set(ref) and (theirs[actor] in fsdp) != (theirs[ref] in fsdp):
        why = f"{actor}={theirs[actor]} and {ref}={theirs[ref]}: policy and reference have one"
        found |= {actor: why, ref: why}
    if theirs["trainer.resume_mode"] == "resume_path" and theirs["trainer.resume_from_path"] is None:
        found["trainer.resume_mode"] = "resume_path needs trainer.resume_from_path, which is not set"
    return found

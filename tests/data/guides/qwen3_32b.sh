#!/usr/bin/env bash
# DAPO of Qwen3-32B on 4 x 16 NPUs: the keys and values of the guide's script, in a form of our own.
set -euo pipefail

# 长度
prompt=$((1024 * 2)) response=$((1024 * 20))
buffer=$((1024 * 4))
prompts=64
mini=$((prompts / 2))
sp=4
tokens=$(((prompt + response) / sp))
NNODES=${NNODES:-4}
MODEL_PATH=/path/to/Qwen3-32B
TRAIN_FILE=/path/to/dapo-math-17k.parquet
offload=True
temperature=1.0 top_k=-1

DATA=(
    data.train_files="${TRAIN_FILE}"
    data.val_files="${TRAIN_FILE}"
    data.prompt_key=prompt
    data.truncation='left'
    data.max_prompt_length=${prompt}
    data.max_response_length=${response}
    data.gen_batch_size=$((prompts * 1))
    data.train_batch_size=${prompts}
)
ALGORITHM=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    algorithm.kl_ctrl.kl_coef=0.0
    algorithm.filter_groups.enable=False
    algorithm.filter_groups.max_num_gen_batches=10
    algorithm.filter_groups.metric=acc
    reward_model.reward_manager=dapo
    reward_model.overlong_buffer.enable=True
    reward_model.overlong_buffer.len=${buffer}
    reward_model.overlong_buffer.penalty_factor=1.0
)
for role in actor ref; do # what both have
    ACTOR+=(
        actor_rollout_ref.${role}.strategy=fsdp2
        actor_rollout_ref.${role}.use_torch_compile=False
        actor_rollout_ref.${role}.ulysses_sequence_parallel_size=${sp}
        actor_rollout_ref.${role}.fsdp_config.param_offload=${offload}
    )
done
for role in ref rollout; do
    ACTOR+=(
        "actor_rollout_ref.${role}.log_prob_use_dynamic_bsz=True"
        "actor_rollout_ref.${role}.log_prob_max_token_len_per_gpu=${tokens}"
    )
done

nohup python3 -m recipe.dapo.main_dapo \
    "${DATA[@]}" "${ALGORITHM[@]}" "${ACTOR[@]}" \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${tokens} \
    actor_rollout_ref.actor.ppo_mini_batch_size=${mini} \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.kl_loss_coef=0.0 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=${offload} \
    actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.70 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.enable_chunked_prefill=True \
    actor_rollout_ref.rollout.enforce_eager=False \
    actor_rollout_ref.rollout.max_num_batched_tokens=$((prompt + response)) \
    actor_rollout_ref.rollout.temperature=${temperature} \
    actor_rollout_ref.rollout.top_p=1.0 \
    actor_rollout_ref.rollout.top_k="${top_k}" \
    actor_rollout_ref.rollout.val_kwargs.temperature=${temperature} \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.rollout.val_kwargs.top_k=${top_k} \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.n=1 \
    trainer.logger='["console"]' \
    trainer.project_name='DAPO' \
    trainer.experiment_name="DAPO-Qwen3-32B" \
    trainer.n_gpus_per_node=16 \
    trainer.nnodes="${NNODES}" \
    trainer.val_before_train=False \
    trainer.save_freq=100 \
    trainer.test_freq=-1 \
    trainer.val_before_train=False \
    trainer.total_epochs=10 \
    trainer.default_local_dir="/path/to/Qwen3-32B-save" \
    trainer.resume_mode=auto \
    trainer.balance_batch=True \
    trainer.device=npu "$@" > "logs/qwen3_32b_$(date +%Y%m%d_%H%M).log" 2>&1 &

#!/usr/bin/env bash
# DAPO of Qwen3-VL-30B-A3B on 16 NPUs as a Ray job: the keys and values of verl-recipe's script for it.
set -xeuo pipefail
export VLLM_USE_V1=1 HCCL_CONNECT_TIMEOUT=5400 VLLM_ASCEND_ENABLE_NZ=0
export LD_PRELOAD=/usr/local/lib/libjemalloc.so.2 USE_OPTIMIZED_MODEL=0

name=DAPO
run=DAPO-Qwen3-vl-30B
prompt=1024
response=2048
batch=64
sp=1
PWD=./
WORKING_DIR=${WORKING_DIR:-"${PWD}"}
RUNTIME_ENV=${RUNTIME_ENV:-"${WORKING_DIR}/verl/trainer/runtime_env.yaml"}
DATA_HOME=${DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${DATA_HOME}/models/Qwen3-VL-30B-A3B-Instruct"}
tokens=$(((prompt + response) / sp))
for role in actor rollout ref; do
    prefix=actor_rollout_ref.$role
    case $role in
        actor) SIZES+=("$prefix.ppo_micro_batch_size_per_gpu=4" "$prefix.ppo_max_token_len_per_gpu=$tokens" "$prefix.use_dynamic_bsz=True") ;;
        *) SIZES+=("$prefix.log_prob_micro_batch_size_per_gpu=4" "$prefix.log_prob_max_token_len_per_gpu=$tokens" "$prefix.log_prob_use_dynamic_bsz=True") ;;
    esac
done

ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" --working-dir "${WORKING_DIR}" \
    --address "${RAY_ADDRESS:-http://localhost:8265}" \
    -- python3 -m recipe.dapo.main_dapo "${SIZES[@]}" \
    data.train_files="${DATA_HOME}/data/geo3k/train.parquet" \
    data.val_files="${DATA_HOME}/data/geo3k/test.parquet" \
    data.prompt_key=prompt \
    data.truncation='left' \
    data.max_prompt_length=${prompt} \
    data.max_response_length=${response} \
    data.gen_batch_size=$((batch * 3)) \
    data.train_batch_size=${batch} \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    algorithm.kl_ctrl.kl_coef=0.0 \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.max_num_gen_batches=4 \
    algorithm.filter_groups.metric=acc \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.kl_loss_coef=0.0 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.use_torch_compile=False \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp} \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.fsdp_config.fsdp_size=16 \
    actor_rollout_ref.ref.strategy=fsdp2 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.ref.ulysses_sequence_parallel_size=${sp} \
    critic.strategy=fsdp2 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.enforce_eager=False \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.70 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.expert_parallel_size=4 \
    actor_rollout_ref.rollout.enable_chunked_prefill=True \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=0 \
    actor_rollout_ref.rollout.{temperature,top_p,val_kwargs.temperature}=1.0 \
    actor_rollout_ref.rollout.{top_k,val_kwargs.top_k}=-1 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.n=1 \
    reward.reward_manager.name=dapo \
    reward.reward_kwargs.overlong_buffer_cfg.enable=False \
    reward.reward_kwargs.overlong_buffer_cfg.len=$((1024 * 2)) \
    reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    reward.reward_kwargs.max_resp_len=${response} \
    trainer.logger=console \
    trainer.project_name="${name}" \
    trainer.experiment_name="${run}" \
    trainer.n_gpus_per_node=16 \
    trainer.nnodes=1 \
    trainer.val_before_train=True \
    trainer.test_freq=1 \
    trainer.save_freq=20 \
    trainer.resume_mode=auto \
    trainer.device=npu \
    trainer.total_epochs=30 \
    trainer.total_training_steps=100 \
    trainer.default_local_dir="${DATA_HOME}/ckpts/${name}/${run}"

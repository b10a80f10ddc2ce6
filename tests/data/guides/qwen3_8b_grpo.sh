# GRPO of Qwen3-8B: the script for DAPO without what the guide says to leave out, started by main_ppo.
set -x
export VLLM_USE_V1=1
export BASE_MODEL=/path/to/Qwen3-8B EXPERIMENT_NAME=Qwen3-8B-grpo
export REWARD_PATH=${REWARD_PATH:-/path/to/reward_score.py}
DATASET=/path/to/train.parquet
SAVE_DIR=/path/to/checkpoints/$EXPERIMENT_NAME

train() {
    local entry=$1
    shift
    python3 -m $entry "$@" reward_model.reward_manager=naive \
        actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
}

train verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.kl_ctrl.kl_coef=0.001 \
    data.train_files=$DATASET \
    data.val_files=$DATASET \
    data.train_batch_size=128 \
    data.max_prompt_length=1024 \
    data.max_response_length=10000 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    data.shuffle=True \
    actor_rollout_ref.model.path=$BASE_MODEL \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.use_torch_compile=False \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.01 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.max_num_batched_tokens=$((1024 + 10000)) \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.rollout.temperature=0.6 \
    actor_rollout_ref.rollout.top_p=0.95 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.enforce_eager=False \
    custom_reward_function.path=$REWARD_PATH \
    custom_reward_function.name=${REWARD_NAME:-compute_score} \
    trainer.critic_warmup=0 \
    trainer.logger=['console'] \
    trainer.n_gpus_per_node=16 \
    trainer.nnodes=1 \
    trainer.save_freq=5 \
    trainer.test_freq=-100 \
    trainer.default_local_dir=$SAVE_DIR \
    trainer.val_before_train=False \
    trainer.device=npu \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.max_critic_ckpt_to_keep=2 \
    trainer.total_epochs=5

"""A custom training loop from the parts in `qerl_jax.rl`: the tiny base learns arithmetic on a CPU.

    python -m examples.own_loop

Noise (AQN), sampling, rewards, advantages and the update are one call each, with values in and values out. Change what
is between them.
"""

import jax
import jax.numpy as jnp

import qerl_jax
from qerl_jax import rl
from qerl_jax.data import datasets


def train(
    steps: int = 20, prompts: int = 32, *, seed: int = 0
) -> tuple[qerl_jax.Policy, list[float]]:
    """Trains an adapter. Returns the policy with it and the mean reward of every step."""
    policy = qerl_jax.load("qerl-tiny", lora=qerl_jax.LoraConfig(16, 16.0), dtype="float32")
    problems = datasets.from_config(qerl_jax.DataConfig("arithmetic"), split="train", seed=seed)
    reward = rl.resolve(["correct_and_well_formed_reward"])

    lengths = {"max_prompt_length": 48, "max_completion_length": 44}
    rollout_cfg = qerl_jax.RolloutConfig(num_generations=8, max_completion_length=44)
    sampler = rl.make_sampler(policy.model, policy.tokenizer, rollout_cfg, max_prompt_length=48)
    optim = qerl_jax.OptimConfig(
        learning_rate=3e-3,
        weight_decay=0.0,
        max_grad_norm=1.0,
        per_device_train_batch_size=8 * prompts,
    )
    objective = rl.Objective(
        policy.model,
        qerl_jax.GrpoConfig(epsilon_high=0.28),
        temperature=1.0,
        num_tokens=policy.tokenizer.num_tokens,
    )
    updater = rl.Updater(objective, optim, total_steps=steps, **lengths)
    sigma = rl.sigma_schedule(sigma_start=1e-2, sigma_end=1e-4, num_stages=10, total_steps=steps)
    shapes = rl.noise_shapes(policy.model.arch)

    frozen = policy.variables["frozen"]
    # A copy, because the update donates the buffers of its state.
    state = rl.init_state(jax.tree.map(jnp.copy, policy.variables["params"]), optim)
    sample_key, noise_key, update_key = jax.random.split(jax.random.key(seed), 3)
    rewards_by_step = []
    for step in range(steps):
        noise = rl.norm_noise(rl.step_key(noise_key, step), sigma(step), shapes)
        variables = {"frozen": frozen, "params": state.params, "noise": noise}
        batch = datasets.batch(problems, step, batch_size=prompts, seed=seed)
        rollout = rl.collect(sampler, variables, batch, jax.random.fold_in(sample_key, step))
        rewards, _ = rl.score(rollout, reward, None)
        experience = rl.make_experience(rollout, rl.group_advantages(rewards))
        key = jax.random.fold_in(update_key, step)
        state, metrics = updater(state, frozen, experience, None, key)
        rewards_by_step.append(float(rewards.mean()))
        print(f"step {step + 1:3}  reward {rewards.mean():.3f}  loss {metrics['loss']:+.4f}")
    return policy.with_params(state.params), rewards_by_step


if __name__ == "__main__":
    trained, _ = train()
    print(trained.generate("What is (5-3)*3?", temperature=0.0, max_tokens=44)[0].text)

"""Teaches the tiny base the form of calls, by imitation: `python -m examples.teach_calls FOLDER`.

Larger models know how to call tools. The tiny base has never seen a call and does not know most letters. So its calls
are questions, "What is 37*46?", which `tools.call_pattern` recognizes. The adapter from this script asks in some
answers and gives a bare number in the others. configs/calculator_arithmetic.toml starts from it and learns when to ask.
The update is GRPO's, with an advantage of 1 for every row.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import qerl_jax
from qerl_jax import rl
from qerl_jax.data import datasets
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.tools import tool_calls
from qerl_jax.tools.stock_tools import calculator

LENGTHS = {"max_prompt_length": 32, "max_completion_length": 48}


def demonstration(tokens: Tokenizer, question: str, *, calls: bool) -> tuple[list[int], list[bool]]:
    """Tokens of an answer, with a call or with a wrong number instead, and a mask of the tokens that the tool gives."""
    stop = tokens.stop_tokens[0]
    ids = lambda text: [*tokens.ids([text])[0], stop]
    if not calls:
        answer = ids("<think>Easy.</think><answer>100</answer>")
        return answer, [False] * len(answer)
    result = calculator(question.removeprefix("What is ").removesuffix("?"))
    message = {"role": "tool", "name": "calculator", "content": result}
    reply = tool_calls.answer(tokens, [message], after_stop=True)
    call, answer = ids(question), ids(f"<answer>{result}</answer>")
    return [*call, *reply, *answer], [False] * len(call) + [True] * len(reply) + [False] * len(
        answer
    )


def teach(
    steps: int = 200, rows: int = 32, *, share: float = 0.3, seed: int = 0
) -> qerl_jax.Policy:
    """The tiny base with an adapter that calls in about `share` of its answers."""
    policy = qerl_jax.load("qerl-tiny", lora=qerl_jax.LoraConfig(16, 16.0), dtype="float32")
    tokens, rng = policy.tokenizer, np.random.default_rng(seed)
    data = qerl_jax.DataConfig("arithmetic", name="products")
    problems = datasets.from_config(data, split="train", seed=seed)
    optim = qerl_jax.OptimConfig(
        learning_rate=5e-3, weight_decay=0.0, max_grad_norm=1.0, per_device_train_batch_size=rows
    )
    # One step with ratios of 1, so that the gradient is that of the mean log-probability.
    objective = rl.Objective(
        policy.model, qerl_jax.GrpoConfig(old_logprobs="recompute"), 1.0, tokens.num_tokens
    )
    updater = rl.Updater(objective, optim, total_steps=steps, **LENGTHS)
    state = rl.init_state(jax.tree.map(jnp.copy, policy.variables["params"]), optim)
    for step in range(steps):
        batch = datasets.batch(problems, step, batch_size=rows, seed=seed)
        # First only answers with calls, then both kinds.
        now = 1.0 if step < steps * 2 // 3 else share
        shown = [
            demonstration(tokens, item.prompt[-1]["content"], calls=rng.random() < now)
            for item in batch
        ]
        rollout = rl.Rollout(
            problems=tuple(batch),
            prompt_ids=tuple(
                np.array(ids, np.int32) for ids in tokens.encode([item.prompt for item in batch])
            ),
            texts=("",) * rows,
            completion_ids=tuple(np.array(ids, np.int32) for ids, _ in shown),
            behaviour_logps=tuple(np.zeros(len(ids), np.float32) for ids, _ in shown),
            stopped=(True,) * rows,
            observation_mask=tuple(np.array(received) for _, received in shown),
        )
        experience = rl.make_experience(rollout, np.ones((rows, 1)))
        key = jax.random.fold_in(jax.random.key(seed), step)
        state, metrics = updater(state, policy.variables["frozen"], experience, None, key)
        if step % 20 == 19:
            # With reference log-probabilities of 0 the divergence is the imitation loss, in nats per token.
            print(f"step {step + 1:3}  loss {metrics['sampling/kl']:.3f}")
    return policy.with_params(state.params)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    print(teach().save_pretrained(parser.parse_args().folder))

"""A policy that can answer, stream, score completions, and be saved."""

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import runtime
from qerl_jax.api.settings import Mesh, divide_tools, mesh_of, options_of, tools_table
from qerl_jax.checkpoint import hf_folder, peft
from qerl_jax.checkpoint import policy as sources
from qerl_jax.checkpoint.policy import LoadedPolicy, PolicySource
from qerl_jax.config import DENSE, Dtype, LoraConfig, ToolsConfig, Weights
from qerl_jax.data import datasets
from qerl_jax.data.datasets import Problem
from qerl_jax.data.tokenizer import Prompt
from qerl_jax.distributed import sharding
from qerl_jax.generation.prompts import encode
from qerl_jax.generation.sampler import Completion, Sampler, row_keys
from qerl_jax.generation.sampling_params import EngineLimits, SamplingParams
from qerl_jax.generation.stop_strings import text_before, with_stop_tokens
from qerl_jax.model import fused_decode
from qerl_jax.rl import microbatches
from qerl_jax.rl.experience import Experience, make_experience
from qerl_jax.rl.objective import token_logps
from qerl_jax.rl.rollouts import Rollout
from qerl_jax.system.checked import (
    NOT_FINITE,
    ConfigError,
    NotFinite,
    from_table,
    require,
    require_seed,
    require_unicode,
)
from qerl_jax.tools.conversations import Tools
from qerl_jax.tools.environments import Tool, Toolboxes

# Tokens, padding included, whose log-probabilities are computed together; and the narrowest padding.
_SCORED_TOKENS, _NARROWEST = 16384, 32
# Tokens of a chunk in `Policy.stream`, which appear at once.
_STREAMED_TOKENS = 8
# Nobody knows yet how many rows will be sampled: as many replicas as there are devices for.
_ANY_ROWS = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class CompletionOutput:
    """One completion, by vLLM's names.

    Attributes:
        index: Its place among the n completions of its prompt.
        text: The text without special tokens, and without the stop string or stop token that ended it.
        token_ids: int32 [tokens], to the stop token or the token that completed a stop string.
        logprobs: float32 [tokens], the sampler's log-probability of each token at its temperature (at
            temperature 0: at 1), before any top-k, top-p or min-p.
        finish_reason: "stop", or "length" where it was cut.
        messages: With tools, the conversation: the policy's turns and the tools' answers as chat messages.
            `text` is then the last turn, and `token_ids` has the tokens of all turns.
        given: With tools, bool [tokens]: True for tokens that a tool gave; their log-probabilities are 0.
    """

    index: int
    text: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: Literal["stop", "length"]
    messages: list[dict[str, Any]] | None = None
    given: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class RequestOutput:
    """A prompt and its completions, by vLLM's names.

    Attributes:
        prompt: The prompt as it was given, a text or a chat.
        prompt_token_ids: int32 [tokens], the prompt as the model saw it.
        outputs: Its n completions.
    """

    prompt: Prompt
    prompt_token_ids: np.ndarray
    outputs: list[CompletionOutput]

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.outputs[0].text


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Policy(LoadedPolicy):
    """A policy on the device, from `load` or from the `policy()` of a run.

    A prompt is a text, which is a user's message and passes the chat template, or a list of chat
    messages, each a dict with "role" and "content". If the policy is that of a run with
    `data.apply_chat_template = false`, or if its tokenizer has no chat template, it continues a text as it is.

    Attributes:
        model: The modules of the model.
        variables: The variables of the model: `frozen` (the base) and, with an adapter, `params`.
        tokenizer: The tokenizer of the base; its `hf` is the transformers tokenizer.
        source: The files that the policy comes from.
        replicas: The devices that hold it.
        limits: How many completions are sampled at a time.
        tools: Tools that the policy may call; None for single-turn completions.
        unsaved: Whether its weights are in no file: a fresh adapter, or weights from your own training loop.
    """

    limits: EngineLimits = EngineLimits()
    tools: Tools | None = None
    unsaved: bool = False

    def __repr__(self) -> str:
        model, path = self.source.model, self.source.adapter
        adapter = "unsaved" if self.unsaved else path and os.fspath(path)
        return f"Policy({model.model_name_or_path!r}, {adapter=}, weights={model.weights!r})"

    @property
    def slow_because(self) -> str | None:
        """The reason why this GPU samples more slowly than it could, and the remedy; None if there is none."""
        rows = int(self.limits.max_concurrent or fused_decode.MAX_ROWS)
        return fused_decode.slow_because(self.model.own_part, rows)

    def with_params(self, params: Any) -> "Policy":
        """Returns the policy with another adapter of the same shape, such as the `params` of a training state.

        Args:
            params: As `policy.variables["params"]`. An update reuses the buffers of the state that it is
                given, so take the params of the newest state.
        """
        rule = "needs a policy with an adapter"
        require(self.model.lora is not None, "params", type(params), rule)
        variables = self.variables | {"params": params}
        return dataclasses.replace(self, variables=variables, unsaved=True)

    def with_tools(
        self,
        tools: Tool | Sequence[Tool] | Mapping[str, Any] | ToolsConfig | None = None,
        environment_factory: Tool | Mapping[str, Tool] | None = None,
        *,
        log: Callable[[str], None] = lambda text: None,
    ) -> "Policy":
        """Returns the policy with tools, which it may call when it generates or is evaluated.

        >>> section = {"functions": ["calculator"], "call_pattern": "<think>(?P<argument>[^=]*)="}
        >>> able = policy.with_tools(section)
        >>> output = able.generate("What is 20+15?", temperature=0.0, max_tokens=80)[0].outputs[0]
        >>> [message["role"] for message in output.messages[:2]]
        ['assistant', 'tool']

        Args:
            tools: As `qerl_jax.train` takes them; or a `ToolsConfig`, such as that of a run,
                `run.config.tools`.
            environment_factory: As `qerl_jax.train` takes it.
            log: Called with warnings: of tools that cannot be killed, and of a chat template that does not
                show tools.

        Raises:
            ConfigError: For arguments that are no such thing, or a chat template that asks for calls
                in no known form.
            ValueError: For a tool that cannot be found, or cannot be shown to the policy.
        """
        section, objects = divide_tools(tools)
        table = tools_table(section, objects, environment_factory)
        cfg = from_table(ToolsConfig, table, "tools.")
        boxes = Toolboxes(cfg, objects, environment_factory)
        return dataclasses.replace(self, tools=Tools.of(cfg, self.tokenizer, boxes, log))

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        columns: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Samples n completions of each prompt.

        >>> outputs = policy.generate(["What is 4*5?", "What is 9-2?"], n=2, max_tokens=20)
        >>> [len(output.outputs) for output in outputs]
        [2, 2]
        >>> first = outputs[0].outputs[0]
        >>> len(first.token_ids) == len(first.logprobs) <= 20
        True
        >>> params = qerl_jax.SamplingParams(max_tokens=1)
        >>> policy.generate("What is 4*5?", params)[0].outputs[0].finish_reason
        'length'

        Args:
            prompts: Texts or chats; a single one stands for a list of one.
            sampling_params: How completions are sampled; absent means the defaults.
            columns: For a policy with an environment: a table for each prompt, with which the environment
                begins.
            **options: Fields of `SamplingParams` that take another value.

        Returns:
            An output per prompt, in their order.

        Raises:
            ConfigError: For prompts, columns or options that are no such thing, by their name.
            ValueError: For a prompt that is longer than the context of the model.
        """
        params = self._params(sampling_params, options)
        prompts = _prompts(prompts)
        completions = self._in_order(prompts, params, columns)
        outputs = []
        for prompt in prompts:
            of_prompt = list(itertools.islice(completions, params.n))
            finished = [self._output(row, params, i) for i, row in enumerate(of_prompt)]
            outputs.append(RequestOutput(prompt, of_prompt[0].prompt_ids, finished))
        return outputs

    def completions(
        self,
        prompts: str | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        columns: Sequence[Mapping[str, Any]] | None = None,
        first: int = 0,
        **options: Any,
    ) -> Iterator[CompletionOutput]:
        """Gives what `generate` returns one by one: n completions per prompt in their order, each as soon as possible.

        >>> first, *others = policy.completions(["What is 4*5?", "What is 9-2?"], n=2, max_tokens=20)
        >>> first.index, len(others)
        (0, 3)

        Args:
            prompts: This and the others are as for `generate`, which also says what is refused, at the call.
            sampling_params: See there.
            columns: See there.
            first: Number of completions to leave out at the front. The others are the same as with them, except for
                rounding.
            **options: See there.
        """
        params = self._params(sampling_params, options)
        completions = self._in_order(_prompts(prompts), params, columns, first)
        return (
            self._output(row, params, (first + i) % params.n) for i, row in enumerate(completions)
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> Iterator[str]:
        """Gives the text of one completion in chunks, as it is sampled; not with tools.

        >>> chunks = list(policy.stream("What is 2+2?", temperature=0.0, max_tokens=16))
        >>> "".join(chunks) == policy.generate("What is 2+2?", temperature=0.0, max_tokens=16)[0].text
        True

        Args:
            prompt: A text or a chat.
            sampling_params: How it is sampled, with n = 1.
            **options: Fields of `SamplingParams` that take another value.
        """
        params = self._params(sampling_params, options)
        require(self.tools is None, "tools", self.tools, "a stream calls no tools: use generate")
        require(params.n == 1, "n", params.n, "a stream gives one completion")
        (problem,) = self._problems(_prompts(prompt))
        ((key,),) = _keys(params, 1)
        sampler = self._sampler(params, chunk=_STREAMED_TOKENS)
        return sampler.stream(self.variables, problem, key)

    def _problems(
        self, prompts: Sequence[Prompt], columns: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Problem]:
        """Makes problems of prompts: a text becomes a message of the user, if these pass the chat template."""
        chats = (
            [({"role": "user", "content": p},) if isinstance(p, str) else p for p in prompts]
            if self.apply_chat_template
            else prompts
        )
        rows = columns or [{}] * len(chats)
        return [Problem(chat, dict(row)) for chat, row in zip(chats, rows, strict=True)]

    def _params(self, params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
        """Returns sampling options with changes, and with what ends a completion of this policy."""
        params = options_of(SamplingParams, params, "sampling_params", options)
        return with_stop_tokens(params, self.tokenizer)

    def _output(
        self, completion: Completion, params: SamplingParams, index: int
    ) -> CompletionOutput:
        """Returns a completion by vLLM's names; `index` is its number among those of its prompt."""
        row, talk = completion.row, completion.conversation
        text = text_before(completion.text, row.tokens.tolist(), params, self.tokenizer.decode)
        messages = None if talk is None else list(talk.messages)
        assert row.ended is not None
        columns = (text, row.tokens, row.behaviour_logps, row.ended, messages, row.given)
        return CompletionOutput(index, *columns)

    def _sampler(self, params: SamplingParams, **options: Any) -> Sampler:
        return Sampler.of(
            *(self.model, self.tokenizer, params, self.limits.on_this_device()),
            tools=self.tools,
            replicas=self.replicas,
            **options,
        )

    def _in_order(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        columns: Sequence[Mapping[str, Any]] | None = None,
        first: int = 0,
    ) -> Iterator[Completion]:
        """Samples completions, and yields them in the order of the prompts; errors are raised at the call."""
        holds = columns is None or (self.tools is not None and len(columns) == len(prompts))
        rule = f"must be one for each of {len(prompts)} prompts, and go with tools"
        require(holds, "columns", columns, rule)
        if not prompts:
            return iter(())
        skipped, begun = divmod(first, params.n)
        keys = list(_keys(params, len(prompts))[skipped:])
        keys[0] = keys[0][begun:]
        problems = self._problems(prompts, columns)[skipped:]
        return _sorted(self._sampler(params).ask(self.variables, problems, keys))

    def logprobs(
        self,
        prompts: str | Sequence[Prompt],
        completions: str | Sequence[str | Sequence[int]],
        *,
        temperature: float = 1.0,
        adapter: bool = True,
    ) -> list[np.ndarray]:
        """Computes the log-probability of each token of given completions, as training does.

        >>> output = policy.generate("What is 9-2?", max_tokens=12)[0].outputs[0]
        >>> (logprobs,) = policy.logprobs(["What is 9-2?"], [output.token_ids])
        >>> bool(abs(logprobs - output.logprobs).max() < 1e-4)  # in float32
        True

        Args:
            prompts: Texts or chats.
            completions: One for each prompt: the ids of its tokens, or a text, which is tokenized without a
                stop token at its end. A sampled text may be tokenized differently from how it was sampled:
                for a completion of `generate` give its `token_ids`.
            temperature: Temperature of the log-probabilities; 0 counts as 1, as in sampling.
            adapter: Whether the adapter is used; without it these are the log-probabilities of the base.

        Returns:
            A float32 array [tokens] per completion.

        Raises:
            ConfigError: For prompts or completions that are no such thing.
            ValueError: For a row that is longer than the context of the model, or whose log-probabilities are NaN.
        """
        prompts = _prompts(prompts)
        completions = [completions] if isinstance(completions, str) else list(completions)
        count, rule = len(completions), f"must be one for each of {len(prompts)} prompts"
        require(count == len(prompts), "completions", count, rule)
        prompt_ids = list(encode(self._problems(prompts), self.tokenizer))
        ids = [self._token_ids(i, completion) for i, completion in enumerate(completions)]
        require(temperature >= 0, "temperature", temperature, "must not be negative")
        for one, other in zip(prompt_ids, ids, strict=True):
            self.model.arch.require_context(len(one), len(other), "completions")
        if not prompts:
            return []
        widths = [_power_of_two(max(map(len, rows))) for rows in (prompt_ids, ids)]
        size = max(1, min(_SCORED_TOKENS // sum(widths), _power_of_two(len(ids), 1)))
        variables = self.replicas.each(self.variables)[0]
        options = {"num_tokens": self.tokenizer.num_tokens, "adapter": adapter}
        experience = _experience(prompt_ids, ids)
        # One shape, which calls with similar lengths share.
        lengths = {"prompt_width": widths[0], "completion_width": widths[1]}
        shapes = microbatches.shapes_of_rows(size, prompts=size, **lengths)[:1]
        logps, heat = [], jnp.float32(temperature)
        for batch in microbatches.by_rows(
            experience.rows_to_divide(np.arange(len(ids))), size, shapes
        ):
            packed = experience.pack(batch, {})
            scored = _token_logps(self.model, variables, packed, heat, **options)
            logps.append(np.asarray(scored)[: batch.rows.lengths.sum()])
        by_row = np.split(np.concatenate(logps), experience.offsets[1:-1])
        for i, values in enumerate(by_row):
            if np.isnan(values).any():
                raise NotFinite(
                    f"logprobs: completion {i} has the log-probability nan. {NOT_FINITE}"
                )
        return by_row

    def save_pretrained(self, folder: str | os.PathLike) -> pathlib.Path:
        """Writes the adapter as a PEFT folder; of a policy without one, the whole 16-bit model.

        >>> adapted = qerl_jax.load("qerl-tiny", lora=qerl_jax.LoraConfig(rank=4), dtype="float32")
        >>> adapted.save_pretrained("fresh-adapter").name
        'fresh-adapter'
        >>> qerl_jax.load(adapter="fresh-adapter", dtype="float32")
        Policy('qerl-tiny', adapter='fresh-adapter', weights='nvfp4')

        Args:
            folder: Appears whole or not at all; replaced if it is such a folder already.

        Returns:
            The folder.

        Raises:
            FileExistsError: When the folder holds something else.
            ConfigError: For a packed base without an adapter, which learned nothing.
        """
        folder, base = pathlib.Path(folder), self.source.model
        if (lora := self.model.lora) is not None:
            peft.export_adapter(folder, self.variables["params"], lora, base.model_name_or_path)
            return folder
        rule = "is packed, and has no adapter that could be saved; see qerl_jax.quantize"
        require(base.weights in DENSE, "weights", base.weights, rule)
        rule = "divides the weights of this policy: to save it, load it without a mesh"
        require(self.model.tensor == 1, "mesh.tensor", self.model.tensor, rule)
        files = hf_folder.local_folder(base.model_name_or_path)
        hf_folder.export_model(folder, self.model, self.variables["frozen"], files)
        return folder

    def _token_ids(self, index: int, completion: Any) -> np.ndarray:
        """The ids of a given completion, int32 [tokens]."""
        if isinstance(completion, str):
            require_unicode(completion, f"completions[{index}]")
            return np.array(self.tokenizer.ids([completion])[0], np.int32)
        ids = np.asarray(completion)
        is_ids = ids.ndim == 1 and (ids.size == 0 or np.issubdtype(ids.dtype, np.integer))
        name, known = f"completions[{index}]", self.tokenizer.num_tokens
        require(is_ids, name, completion, "must be a text or the ids of its tokens")
        holds = bool(np.all((ids >= 0) & (ids < known)))
        require(holds, name, completion, f"must have ids in [0, {known})")
        return ids.astype(np.int32)


def load(
    name: str | os.PathLike | None = None,
    adapter: str | os.PathLike | None = None,
    *,
    lora: LoraConfig | None = None,
    weights: Weights | None = None,
    dtype: Dtype | None = None,
    seed: int = 0,
    max_concurrent: int | None = None,
    kv_cache_tokens: int | None = None,
    kv_cache_fraction: float | None = None,
    mesh: Mesh | None = None,
    quiet: bool = False,
) -> Policy:
    """Loads a policy: a base, and an adapter over it if one is named.

    >>> import qerl_jax
    >>> policy = qerl_jax.load("qerl-tiny", dtype="float32")
    >>> policy
    Policy('qerl-tiny', adapter=None, weights='nvfp4')
    >>> policy.generate("What is (5-3)*3?", temperature=0.0, max_tokens=40)[0].text[:7]
    '<think>'

    Args:
        name: A folder or hub name of a model, or a run folder; absent means the base of the adapter,
            or "qerl-tiny", which ships with the package.
        adapter: A PEFT folder, or a run folder, whose adapter is taken. Of a run that has not ended it is the
            newest checkpoint.
        lora: Gives the base a fresh adapter of that shape, which changes nothing yet: for your own training
            loop. Not with `adapter`.
        weights: Storage format of the linears; absent means that of the adapter's run, else "nvfp4".
        dtype: Data type of the activations; absent means that of the run, else "bfloat16".
        seed: Random seed of a fresh adapter.
        max_concurrent: Completions sampled at a time, by each replica. Absent means as many as fit in the cache if
            each needs a quarter of its limit, at most 512, and at most 64 if the device does not report its memory (a
            CPU does not); but 128 rather than 129 to 256 where fused layers decode.
        kv_cache_tokens: Capacity for keys and values, in tokens; completions wait while it is full.
        kv_cache_fraction: That capacity as a fraction of the free device memory. Give one of the two, or none
            for what `max_concurrent` completions can need.
        mesh: The devices, as the section [mesh] of a config has them: {"tensor": 4} for replicas of four on all
            devices of this process. Absent means one device.
        quiet: Show nothing while the base is read; else the standard error tells how far that is.

    Raises:
        ConfigError: For impossible arguments.
        FileNotFoundError: Where there is no such model or adapter.
    """
    limits = EngineLimits(max_concurrent, kv_cache_tokens, kv_cache_fraction)
    require_seed(seed)
    source = find(name, adapter, weights=weights, dtype=dtype)
    require(lora is None or isinstance(lora, LoraConfig), "lora", lora, "must be a LoraConfig")
    holds = lora is None or source.adapter is None
    require(holds, "lora", lora, "must be absent where an adapter is loaded")
    mesh = mesh_of(mesh, sources.ALONE)
    return of_source(source, limits, seed=seed, lora=lora, mesh=mesh, rows=_ANY_ROWS, quiet=quiet)


def of_source(
    source: PolicySource, limits: EngineLimits, *, quiet: bool = False, **options: Any
) -> Policy:
    """Loads the policy that a source names; `options` are those of `checkpoint.policy.load_policy`."""
    runtime.use_compilation_cache()
    loaded = sources.load_policy(source, quiet=quiet, **options)
    return Policy(**vars(loaded), limits=limits, unsaved=options.get("lora") is not None)


def find(
    name: str | os.PathLike | None, adapter: str | os.PathLike | None = None, **settings: Any
) -> PolicySource:
    """Finds the policy that a name means, which may be a run or PEFT folder; nothing but configs is read."""
    for field, value in (("name", name), ("adapter", adapter)):
        is_name = value is None or isinstance(value, str | os.PathLike)
        require(is_name, field, value, "must be a folder or a hub name")
    if name is not None:
        name = os.fspath(name)
        files = ("config.toml", "adapter_config.json")
        if adapter is None and any((pathlib.Path(name) / file).is_file() for file in files):
            name, adapter = None, name
    adapter = None if adapter is None else os.fspath(adapter)
    return sources.find_policy(name, adapter, **settings)


def _prompts(prompts: Any) -> list[Prompt]:
    """Prompts as a list; a text or a chat by itself is a list of one."""
    if isinstance(prompts, str) or datasets.is_chat(prompts):
        prompts = [prompts]
    rule = "must be texts, or chats of messages with role and content"
    if not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts: got {type(prompts).__name__}; {rule}")
    for index, prompt in enumerate(prompts):
        is_prompt = isinstance(prompt, str) or datasets.is_chat(prompt)
        require(is_prompt, f"prompts[{index}]", prompt, rule)
        require_unicode(prompt, f"prompts[{index}]")
    return list(prompts)


def _keys(params: SamplingParams, prompts: int) -> np.ndarray:
    """Returns key data uint32 [P, n, ...].

    With one seed, rows are numbered through all prompts; with a seed per prompt, from 0 for each prompt.
    """
    seeds: Any = params.seed
    if np.ndim(seeds) == 0:
        return row_keys(jax.random.key(seeds), prompts, params.n)
    rule = f"must be one, or one for each of {prompts=}"
    require(len(seeds) == prompts, "seed", len(seeds), rule)
    return np.concatenate([row_keys(jax.random.key(seed), 1, params.n) for seed in seeds])


def _sorted(completions: Iterator[Completion]) -> Iterator[Completion]:
    """Yields completions in the order of their rows, each as soon as possible."""
    waiting: dict[int, Completion] = {}
    index = 0
    for completion in completions:
        waiting[completion.row.row] = completion
        while index in waiting:
            yield waiting.pop(index)
            index += 1


def _power_of_two(number: int, least: int = _NARROWEST) -> int:
    return max(least, 1 << max(0, number - 1).bit_length())


def _experience(prompts: list, completions: list) -> Experience:
    """Rows with one completion per prompt."""
    count = len(prompts)
    rollout = Rollout(
        problems=(Problem("", {}),) * count,
        prompt_ids=tuple(prompts),
        texts=("",) * count,
        completion_ids=tuple(completions),
        behaviour_logps=tuple(np.zeros(len(ids), np.float32) for ids in completions),
        stopped=(True,) * count,
    )
    return make_experience(rollout, np.zeros((count, 1)))


@functools.partial(jax.jit, static_argnames=("model", "num_tokens", "adapter"))
def _token_logps(model, variables, batch, temperature, *, num_tokens, adapter):
    def scored(variables, batch, temperature):
        options = {"temperature": temperature, "num_tokens": num_tokens, "adapter": adapter}
        return token_logps(model, variables, batch, **options)[0]

    return sharding.in_group(model.group, scored)(variables, batch, temperature)

"""Tests the command line: help, version, misspelt commands, and options that change a config."""

import dataclasses
import datetime
import importlib.metadata
import inspect
import logging
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import pytest

import qerl_jax
from qerl_jax import config
from qerl_jax.cli import common, main, options
from qerl_jax.config import ConfigError, EvalConfig, LoraConfig, NoiseConfig
from qerl_jax.evaluation import pass_rates
from tests.pallas_kernels.common import slow

QERL = [sys.executable, "-m", "qerl_jax"]
QUICKSTART = pathlib.Path(__file__).parents[3] / "configs" / "quickstart.toml"
EXAMPLE = {
    "train": "qerl train quickstart ",
    "plan": 'qerl plan gsm8k_qwen2.5_7b --device "RTX 4090"',
    "compare": "qerl compare runs/mine/eval/",
    "replay": "qerl replay runs/mine/non_finite/",
    "completion": "source <(qerl completion bash)",
}


KL, MASKED = config.ReferenceConfig(0.1, "base"), config.MismatchConfig(mask=config.MaskConfig(2.0))
ROUNDS = config.DynamicSamplingConfig(max_rounds=3)


def changed(*options, path=QUICKSTART):
    return common.run_config("train", [str(path), *options])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--grpo.loss-type sapo --grpo.sapo.temperature-pos 1.2", {"sapo": config.SapoConfig(1.2)}),
        ("--grpo.mismatch.mask.ratio_max 2", {"mismatch": MASKED}),
        ("--grpo.dynamic_sampling.max-rounds=3", {"dynamic_sampling": ROUNDS}),
        ("--grpo.reference.beta 0.1 --grpo.reference.policy base", {"reference": KL}),
        ("--grpo.entropy None", {"entropy": None}),
    ],
)
def test_an_option_of_a_table_switches_it_on(options, expected):
    ((part, section),) = expected.items()
    assert getattr(changed(*options.split()).grpo, part) == section


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--grpo.beta 0.1", "--grpo.beta: is now grpo.reference.beta"),
        ("--grpo.sapo_temperature_pos=2", "--grpo.sapo_temperature_pos: is now grpo.sapo.temp"),
        ("--grpo.reference base", "--grpo.reference: got 'base'; is now grpo.reference.policy"),
        ("--grpo.dynamic_sampling true", "got 'true'; is now a section, [grpo.dynamic_sampling]"),
        ("--grpo.sapo on", "--grpo.sapo: got 'on'; must be None, which switches it off"),
        ("--noise.adaptive.metric kl", "missing --noise.adaptive.target"),
        ("--grpo.mismatch.mask.level token", "missing --grpo.mismatch.mask.ratio-max"),
        ("--lora.rank 0", "lora.rank: got 0; must be at least 1 and at most 8192"),
    ],
)
def test_an_impossible_option_of_a_table_is_an_error_of_one_line(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        changed(*options.split())


@pytest.fixture
def of_epochs(tmp_path):
    """Makes the quickstart's config with epochs instead of steps."""
    path = tmp_path / "epochs.toml"
    text = QUICKSTART.read_text()
    assert text.count("max_steps = ") == 1
    path.write_text(text.replace("max_steps = 30", "num_train_epochs = 2.0"))
    return path


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_lists_the_commands(option, capsys):
    assert main.main([option]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: qerl COMMAND")
    assert all(f"\n  {name} " in shown for name in main.COMMANDS)
    assert "neither too easy nor too hard" in shown and "2 something\nto correct" in shown
    assert main.main([]) == 2 and capsys.readouterr().out == shown


@pytest.mark.parametrize("command", ["train", "plan", "compare", "replay", "env", "completion"])
def test_help_of_a_command_without_its_file_shows_its_own_usage(command, capsys):
    assert main.main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: qerl {command}") and "COMMAND" not in shown
    assert command == "env" or f"\nExamples:\n  {EXAMPLE[command]}" in shown
    assert main.main([command, "-h"]) == 0 and capsys.readouterr().out == shown


@pytest.mark.parametrize("command", ["generate", "filter", "export", "quantize", "eval", "report"])
def test_help_of_a_command_with_options_lists_those_that_are_checked(command, capsys):
    with pytest.raises(SystemExit) as end:
        main.main([command, "--help"])
    assert not end.value.code
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: qerl {command} ")
    assert f"Examples:\n    qerl {command} " in shown
    # An option that may be absent says what that means in words.
    assert "--adapter PATH" in shown or command in ("export", "quantize", "report")
    assert "(default: None)" not in shown.split("--from")[0].split("--columns")[0]
    assert not inspect.getdoc(main.COMMANDS[command]).startswith("usage:")
    assert set(options.of_function(main.COMMANDS[command]).kinds) == in_help(shown)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_after_a_config_is_that_of_the_command_and_every_field_with_its_value(command, capsys):
    with pytest.raises(SystemExit) as end:
        main.main([command, str(QUICKSTART), "--help"])
    shown = capsys.readouterr().out
    assert not end.value.code and "--grpo.mismatch.correction.clip-max FLOAT" in shown
    assert "Rank R of A and B. (default: 16)" in shown
    text = inspect.getdoc(main.COMMANDS[command])
    own = {"train": [], "plan": ["--device", "--device-memory", "--compile"]}[command]
    assert all(f"\n{option} " in shown for option in own)
    assert shown.count(text[text.index("\nExamples:") :]) == 1
    # Lines are filled, also before a quotation mark or a bracket, and no two are empty.
    assert "drafts then (`rollout.drafts`). (default: False)" in shown
    assert "\n\n\n" not in shown


@pytest.mark.parametrize(
    ("words", "same"), [("help", "--help"), ("help train", "train --help"), ("help xx", "xx")]
)
def test_help_is_also_a_command(words, same, capsys):
    codes, shown = [], []
    for each in (words, same):
        codes.append(main.main(each.split()))
        shown.append(capsys.readouterr())
    assert codes[0] == codes[1] and shown[0] == shown[1] and any(shown[0])


@pytest.mark.parametrize("command", [["--version"], ["train", "--version"], ["eval", "--version"]])
def test_the_version_is_that_of_the_package(command, capsys):
    assert main.main(command) == 0
    assert capsys.readouterr().out == f"qerl-jax {importlib.metadata.version('qerl-jax')}\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [("trian", "did you mean train?"), ("exprt", "did you mean export?")]
    + [("--verison", "qerl --help lists them")],
)
def test_a_misspelt_command_suggests_the_nearest(word, hint, capsys):
    assert main.main([word, "x"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error == f"qerl {word}: there is no such command; {hint}\n"


@pytest.mark.parametrize("library", ["datasets", "huggingface_hub"])
def test_a_library_that_writes_its_messages_itself_leaves_them_from_the_root_logger(
    library, monkeypatch
):
    reached, root = [], logging.getLogger()
    monkeypatch.setattr(logging.getLogger(library), "propagate", True)
    monkeypatch.setattr(root, "handlers", [types.SimpleNamespace(level=0, handle=reached.append)])
    __import__(library)
    logger = logging.getLogger(f"{library}.anything")
    logger.warning("before")
    main.main(["--version"])
    logger.warning("after")
    assert [record.msg for record in reached] == ["before"]


CANNOT_BE_READ = """
train quickstart --max-steps ten | --max-steps: got 'ten'; must be a whole number
train quickstart --max-steps | --max-steps: needs a value; must be a whole number
train quickstart --lora.alpha=x | --lora.alpha: got 'x'; must be a number
train quickstart --rollout.drafts on --seed 1 | --rollout.drafts: got 'on'; must be one of 'auto', 'always', 'off'
train quickstart --deterministic yes | --deterministic: got 'yes'; must be true or false
train quickstart --rollout.engine a=1 --seed x
    | --rollout.engine: no such option; qerl train quickstart --help lists them
train quickstart --optim.learning-rat 1 | --optim.learning-rat: no such option; did you mean --optim.learning-rate?
train quickstart --num_generation 1
    | --num_generation: no such option; did you mean --rollout.num-generations or --eval.num-generations?
train quickstart --eval.num-generation 1 | --eval.num-generation: no such option; did you mean --eval.num-generations?
train quickstart --learning_rate 1 | --learning_rate: no such option; did you mean --optim.learning-rate?
train quickstart --nois None | --nois: no such option; did you mean --noise?
train quickstart --optim.lr 1e-4 | --optim.lr: no such option; did you mean --optim.learning-rate?
train quickstart --resume runs/quickstart
    | --resume: no such option; the command that was stopped resumes if it is given again
train quickstart --noise off | --noise: got 'off'; must be None, which switches it off; its fields are --noise.FIELD
train quickstart --lora None
    | --lora: got 'None'; every run has this section, with fields --lora.FIELD; None switches off only --noise, --eval, --tools
train quickstart --model.chat-template-kwargs enable_thinking false
    | --model.chat-template-kwargs: got 'enable_thinking false'; must be given in a config file or from Python: its values may have any type
train quickstart fast | got 'fast'; each option begins with --, as in --seed 1
plan quickstart --devic T4 | --devic: no such option; did you mean --device?
plan --device | --device: expected one argument
eval gsm8k --sampels 4 | --sampels: no such option; did you mean --samples?
eval gsm8k --samples x | --samples: got 'x'; must be a whole number
eval gsm8k --protocol trl | --protocol: got 'trl'; must be one of 'paper', 'verl', 'run'
eval gsm8k --columns prompt | --columns: got 'prompt'; must be pairs of a name and a value
eval gsm8k --columns answer=big
    | --columns: got 'answer=big'; must be pairs of a name and a value, with a space between them: answer big
eval gsm8k --base=true | --base: got 'true'; this option has no value
eval gsm8k --num-problems 0 | num_problems: got 0; must be at least 1 and below 2**31
eval gsm8k --prompt-template x | prompt_template: got 'x'; must contain "{prompt}"
eval gsm8k --batch 4 | --batch: is now --max-concurrent, the completions at a time: all are sampled as one queue
filter quickstart x.jsonl --batch-size 4
    | --batch-size: is now --rollout.max-concurrent, the completions at a time: all are sampled as one queue
plan quickstart --eval.batch-size 4
    | --eval.batch-size: is now rollout.max_concurrent, the completions at a time: all are sampled as one queue
filter quickstart x.jsonl --num-problems 0 | num_problems: got 0; must be at least 1
filter quickstart x.jsonl --sampels 4 | --sampels: no such option; did you mean --samples?
filter quickstart x.jsonl --data.datast a | --data.datast: no such option; did you mean --data.dataset?
filter quickstart x.jsonl --data.size a --low 0 | --data.size: no such option; qerl plan quickstart --help lists them
filter quickstart x.jsonl --low a | --low: got 'a'; must be a number
filter quickstart --data.dataset x.jsonl | missing OUT; qerl filter --help explains
generate hi --adapter | --adapter: needs a value
generate hi --n 2 --temprature 0 | --temprature: no such option; did you mean --temperature?
generate hi --max-tokens 0 | max_tokens: got 0; must be at least 1 and below 2**31
generate hi --n two | --n: got 'two'; must be a whole number
export a b --to merged --from here | --from: got 'here'; must be one of 'original', 'packed'
export | missing RUN, OUT, --to; qerl export --help explains
export runs/mine --to peft | missing OUT; qerl export --help explains
export a b c --to peft | got 'c'; takes RUN OUT and options
"""


@pytest.mark.parametrize("row", re.split(r"\n(?! )", CANNOT_BE_READ.strip()))
def test_an_option_that_cannot_be_read_is_an_error_of_one_line(row, capsys):
    command, message = re.split(r"\s+\| ", row)
    name, *rest = command.split()
    assert main.main([name, *rest]) == 2
    assert capsys.readouterr() == ("", f"qerl {name}: {message}\n")


def test_a_run_folder_in_the_place_of_a_set_is_an_error_that_says_where_it_belongs(
    tmp_path, capsys
):
    config.write_run(tmp_path, changed())
    assert main.main(["eval", str(tmp_path)]) == 2
    rule = f"is a run folder, not a set: qerl eval SET --adapter {tmp_path}"
    assert capsys.readouterr().err == f"qerl eval: sets: got {str(tmp_path)!r}; {rule}\n"


def in_help(shown):
    """Returns the options that a help lists in its boxes."""
    return set(re.findall(r"(?m)^(?:│ |  )(--[a-z][a-z0-9.-]*)", shown))


def test_the_fields_that_are_checked_are_those_of_the_help(capsys):
    given = ["--tools.functions", "calculator"]
    with pytest.raises(SystemExit):
        changed(*given, "--help")
    only_in_files = {"--model.chat-template-kwargs", "--rewards.options"}
    only_in_files |= {"--tools.environment-options"}
    listed = in_help(capsys.readouterr().out)
    assert set(options.of_class(config.RunConfig)) == listed | only_in_files


def test_what_only_the_parser_finds_wrong_comes_without_its_box():
    def born(day: datetime.date) -> None: ...

    known = options.Options({"--day": datetime.date})
    with pytest.raises(ConfigError, match="someday") as error:
        options.parse(born, ["--day", "someday"], known, prog="qerl x")
    assert not re.search(r"[\u2500-\u257f]|---|\n", str(error.value))


@pytest.mark.parametrize("options", [["--deterministic", "true"], ["--deterministic=True"]])
def test_true_is_written_as_in_a_config_or_as_in_python(options):
    assert not config.load(QUICKSTART).deterministic
    # A text that reads true stays that text.
    assert changed("--data.system-prompt", "true").data.system_prompt == "true"
    assert changed("--data.system-prompt=false").data.system_prompt == "false"
    assert changed("--rewards.functions", "true", "false").rewards.functions == ("true", "false")
    assert changed(*options).deterministic
    assert not changed(*options, "--deterministic", "false").deterministic


@pytest.mark.parametrize("options", [["--noise", "None"], ["--noise=None"]])
def test_noise_is_switched_off_by_none(options):
    assert config.load(QUICKSTART).noise is not None
    cfg = changed("--lora.rank", "4", *options, "--seed", "3")
    assert (cfg.noise, cfg.lora.rank, cfg.seed) == (None, 4, 3)


def test_any_section_that_may_be_absent_is_switched_off_by_none(tmp_path):
    tools, path = config.ToolsConfig(functions=("calculator",)), tmp_path / "full.toml"
    path.write_text(config.dump(dataclasses.replace(config.load(QUICKSTART), tools=tools)))
    assert changed(path=path).tools == tools
    cfg = changed("--tools", "None", "--noise", "None", "--eval=None", path=path)
    assert (cfg.tools, cfg.noise, cfg.eval) == (None, None, None)
    assert changed("--tools.functions", "calculator").tools == tools


def test_a_section_that_is_absent_is_switched_on_by_an_option_of_it(tmp_path):
    (tmp_path / "bare.toml").write_text(config.dump(changed("--noise", "None", "--eval", "None")))
    bare = config.load(tmp_path / "bare.toml")
    assert bare.noise is None and bare.eval is None
    cfg = changed("--noise.num-stages=4", "--eval.num_problems", "3", path=tmp_path / "bare.toml")
    assert cfg.noise == NoiseConfig(num_stages=4) and cfg.eval == EvalConfig(num_problems=3)


def test_an_environment_switches_tools_on_and_other_options_take_the_place_of_what_it_did():
    cfg = changed("--tools.environment", "guess_number")
    assert cfg.tools == config.ToolsConfig(environment="guess_number")
    cfg = changed("--tools.environments", "a", "guess_number")
    assert cfg.tools == config.ToolsConfig(environments={"a": "guess_number"})
    # Its environment judges the rows, so it names no reward.
    judged = QUICKSTART.with_name("guess_number_qwen2.5_7b.toml")
    cfg = changed("--tools", "None", "--rewards.functions", "accuracy_reward", path=judged)
    assert (cfg.tools, cfg.rewards.functions) == (None, ("accuracy_reward",))
    with pytest.raises(config.ConfigError, match="rewards.functions: got"):
        changed("--tools", "None", path=judged)


def test_steps_on_the_command_line_take_the_place_of_epochs_and_epochs_that_of_steps(of_epochs):
    for given in (["--max-steps", "4"], ["--max_steps=4"]):
        cfg = changed(*given, path=of_epochs)
        assert (cfg.max_steps, cfg.num_train_epochs) == (4, None)
    cfg = changed("--num-train-epochs", "0.5")
    assert (cfg.max_steps, cfg.num_train_epochs) == (None, 0.5)
    assert changed("--seed", "1", path=of_epochs).num_train_epochs == 2.0
    with pytest.raises(ConfigError, match=r"got \(4, 1\.0\); exactly one of the two must be set"):
        changed("--max-steps", "4", "--num-train-epochs", "1")


@pytest.mark.parametrize("argv", [[], ["--lora.rank", "4"]])
def test_a_missing_config_file_is_named(argv):
    with pytest.raises(ConfigError, match="missing the config file: qerl train CONFIG.toml"):
        common.run_config("train", argv)


@pytest.mark.parametrize(("has_learned", "code"), [(True, 0), (False, 3)])
def test_the_exit_code_tells_whether_a_run_has_learned_anything(
    has_learned, code, monkeypatch, capsys
):
    run = types.SimpleNamespace(report=str, summary=lambda: "curves", has_learned=has_learned)
    monkeypatch.setattr(qerl_jax, "train", lambda cfg: run)
    assert main.main(["train", str(QUICKSTART)]) == code
    said = "qerl train: this run has learned nothing (exit status 3)\n"
    # The run has named its page already.
    assert capsys.readouterr() == ("curves\n", "" if has_learned else said)


@pytest.fixture
def completed(tmp_path, capsys):
    """Returns a function that gives bash's completions of the last word."""
    assert main.main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    command = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _tyro_qerl; '
    command += 'for each in "${COMPREPLY[@]}"; do echo "[$each]"; done'
    bash = ["bash", "-c", command, "-", script, "qerl"]

    def of(*words):
        done = subprocess.run([*bash, *words], capture_output=True, text=True)
        return {line[1:-1] for line in done.stdout.splitlines()}

    return of


def test_a_shell_completes_commands_options_and_values(completed):
    assert completed("") >= set(main.COMMANDS)
    fields = {f"--lora.{field.name.replace('_', '-')}" for field in dataclasses.fields(LoraConfig)}
    assert completed("train", "x.toml", "--lora.") == fields
    assert completed("export", "--to", "") == {"peft", "merged", "nvfp4", "pair"}
    assert completed("eval", "gsm8k", "--prot") == {"--protocol"}
    assert main.main(["completion", "fish"]) == 2


@pytest.mark.slow
def test_a_shell_completes_options_of_other_commands(completed):
    assert completed("exp") == {"export"}
    assert completed("train", "x.toml", "--tools.func") == {"--tools.functions"}
    assert "--lora.rank" in completed("filter", "x.toml", "--lora.")
    assert completed("filter", "--sam") == {"--samples"}
    assert completed("plan", "--dev") == {"--device", "--device-memory"}


@pytest.mark.parametrize("command", ["train", slow("plan"), slow("filter")])
def test_a_shell_completes_a_config_by_its_name_and_then_its_options(command, completed):
    assert completed(command, "gsm8k_qwen3") == {"gsm8k_qwen3_4b", "gsm8k_qwen3_8b"}
    assert completed(command, "paper/gsm8k_qwen2.5_1") == {"paper/gsm8k_qwen2.5_14b"}
    assert completed(command, "quickstart", "--noise.num") == {"--noise.num-stages"}
    assert completed(command, "quickstart", "q") == set()
    # Bash then completes files, and it puts a slash after a folder.
    assert completed(command, "my") == set()
    assert completed("eval", "--adapter", "") == set()


def test_zsh_completes_as_bash_does_and_files_where_nothing_else_fits(capsys):
    assert main.main(["completion", "zsh"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("#compdef qerl")
    condition = 'if [[ -z "$completions" || "$completions" == "__TYRO_COMPLETE_FILES__" ]]; then\n'
    assert f"  {condition}    _files\n" in shown
    _, program, _ = re.split(r"<< 'PYTHON_EOF'\n|\nPYTHON_EOF\n", shown)
    words = ["qerl", "train", "gsm8k_llama", "2"]
    python = [sys.executable, "-", *words]
    done = subprocess.run(python, input=program, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("gsm8k_llama3.1_8b\ta config of the package\n", "")


def test_filter_takes_a_config_by_its_name_and_fields_of_it_as_plan_does(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(pass_rates, "select", lambda *of, **how: given.append((of, how)) or (1, 3))
    command = ["filter", "quickstart", str(tmp_path / "kept.jsonl")]
    assert main.main([*command, "--num-problems", "3"]) == 0 and main.main(command) == 0
    assert [cfg.data.num_problems for (cfg, _), _ in given] == [3, 20_000]
    command = ["filter", "--data.dataset=gsm8k", "--noise", "None", "--samples", "4", "quickstart"]
    command += [str(tmp_path / "kept.jsonl"), "--rewards.functions", "format_reward", "--low", "0"]
    assert main.main(command) == 0
    (cfg, out), how = given[-1]
    assert (cfg.data.dataset, cfg.noise) == ("gsm8k", None)
    assert cfg.rewards.functions == ("format_reward",)
    assert out.name == "kept.jsonl" and (how["samples"], how["low"], how["high"]) == (4, 0, 0.6)


@pytest.mark.slow
@pytest.mark.process
def test_a_broken_data_set_is_one_line_in_a_pipe(tmp_path):
    """Without the bars of `datasets` and what its reader logs."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n{"question":\n')
    command = [*QERL, "train", str(QUICKSTART), "--data.dataset", str(path), "--eval", "None"]
    command += ["--output-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("qerl train: ") and done.stderr.count("\n") == 1
    assert "line 2, column 13: not JSON" in done.stderr


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "command", [slow("--help"), "train --help", slow("train quickstart --help")]
)
def test_an_output_that_nobody_reads_ends_the_command_quietly(command):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        streams = {"stdout": writer, "stderr": subprocess.PIPE}
        done = subprocess.run([*QERL, *command.split()], **streams, text=True)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_pipe_that_breaks_elsewhere_is_an_error_as_any_other(monkeypatch, capsys):
    def broken(cfg):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(qerl_jax, "train", broken)
    assert main.main(["train", str(QUICKSTART)]) == 2
    assert capsys.readouterr().err == "qerl train: [Errno 32] Broken pipe\n"


def test_env_names_versions_and_devices(capsys):
    assert main.main(["env"]) == 0
    shown = capsys.readouterr().out
    assert f"jax {jax.__version__}" in shown and "device 0: cpu" in shown
    assert " GB of memory\n" in shown and "bubblewrap " in shown
    assert "kernels: reference" in shown and "portable kernels: no, needs an NVIDIA GPU" in shown

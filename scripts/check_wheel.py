"""Builds the wheel, installs it into a new environment outside the checkout, and runs the quickstart there.

    python -m scripts.check_wheel            # with the dependencies of this environment: half a minute
    python -m scripts.check_wheel --fresh    # installs the dependencies too, as a user does: minutes
    python -m scripts.check_wheel --keep dist

It finds files that are missing in the wheel (the tiny base, a config, the page template). In a checkout they are always
there.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from itertools import pairwise

ROOT = pathlib.Path(__file__).parents[1]
# The quickstart has 30 steps of 256 completions. Most of the time is compiling.
STEPS = (
    *("--max-steps", "2", "--eval", "None"),
    *("--optim.per-device-train-batch-size", "32", "--optim.gradient-accumulation-steps", "1"),
)
LEFT = ("adapter/adapter_model.safetensors", "report/index.html", "metrics.jsonl")


def build(folder: pathlib.Path) -> pathlib.Path:
    """Builds the wheel of the checkout into a folder and returns its path."""
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # files of an earlier build would be added
    pip("wheel", str(ROOT), "--no-deps", "--wheel-dir", str(folder))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: pathlib.Path, folder: pathlib.Path, *, fresh: bool) -> pathlib.Path:
    """Makes an environment with the wheel in a folder and returns the folder of its commands.

    Dependencies are installed there if it is `fresh`; otherwise it uses those of this environment.
    """
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = ("--python", str(folder / "bin" / "python"))
    if fresh:
        pip(*python, "install", str(wheel), "--constraint", str(ROOT / "constraints.txt"))
    else:
        pip(*python, "install", "--no-deps", str(wheel))
        (site,) = folder.glob("lib/python*/site-packages")
        # A .pth file gives access to installed packages, but not to editable ones, so this checkout stays hidden.
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def check(bin: pathlib.Path, folder: pathlib.Path) -> None:
    """Runs the installed command in a folder, with a user's first commands."""
    where = "import qerl_jax; print(qerl_jax.__file__)"
    imported = run([bin / "python", "-c", where], folder)
    assert imported.startswith(str(bin.parent)), f"the checkout was imported: {imported}"
    assert run([bin / "qerl", "--version"], folder).startswith("qerl-jax ")
    configs = ROOT / "configs"
    names = [str(path.relative_to(configs))[: -len(".toml")] for path in configs.rglob("*.toml")]
    run([bin / "python", "-c", f"import qerl_jax.config as c; list(map(c.load, {names}))"], folder)
    shown = run([bin / "qerl", "train", "quickstart", *STEPS], folder)
    missing = [name for name in LEFT if not (folder / "runs" / "quickstart" / name).is_file()]
    assert not missing, f"the run did not write {missing}:\n{shown}"
    print(shown, end="")


def run(command: list, folder: pathlib.Path = ROOT) -> str:
    """Runs a command without this checkout on its path and returns its output."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"JAX_PLATFORMS": "cpu"}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=folder, env=env, text=True, capture_output=True)
    if done.returncode:
        what = f"{' '.join(words)} ended with {done.returncode}"
        sys.exit(f"{what}:\n{done.stdout}{done.stderr}")
    return done.stdout


def pip(*arguments: str) -> None:
    """Runs the pip of this environment."""
    run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="install the dependencies too")
    parser.add_argument("--keep", type=pathlib.Path, help="copy the wheel to this folder")
    options = parser.parse_args()
    times = [time.monotonic()]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        wheel = build(folder / "dist")
        bin = install(wheel, folder / "venv", fresh=options.fresh)
        times.append(time.monotonic())
        (elsewhere := folder / "elsewhere").mkdir()
        check(bin, elsewhere)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            print(f"wheel in {shutil.copy(wheel, options.keep)}")
    installing, running = (end - start for start, end in pairwise([*times, time.monotonic()]))
    print(f"{wheel.name}: built and installed in {installing:.0f} s, ran in {running:.0f} s")


if __name__ == "__main__":
    main()

"""Tests errors of every linear of SmolLM2, as `scripts/study_quantization.py` recorded them on an H200."""

import json
import pathlib

import numpy as np
import pytest

RECORDED = json.loads(
    (
        pathlib.Path(__file__).parents[3] / "docs" / "measured" / "quantization_errors_smollm2.json"
    ).read_text()
)
BASES, FORMATS = ("packaged", "trained"), ("nvfp4", "mxfp4", "nf4")


def errors(*name):
    """Reads errors of 30 layers x 4 linears: of weights [120], or of outputs [120, 2], to nearest and by the method."""
    found = RECORDED[", ".join(name)]
    assert set(found) == {"qkv", "o", "gate_up", "down"}
    return np.concatenate([found[linear] for linear in sorted(found)])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("base", BASES)
def test_no_linear_is_worse_than_to_nearest(base, form):
    """Errors are of weights if scales are searched without calibration, else of outputs on the calibration rows."""
    nearest, searched = errors(base, form, "nearest"), errors(base, form, "nearest, searched")
    assert nearest.shape == (120,) and (searched <= nearest).all()
    for method in ("awq", "gptq", "awq+gptq"):
        to_nearest, found = errors(base, form, method).T
        assert found.shape == (120,) and (found <= to_nearest).all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("base", BASES)
def test_gptq_is_closer_than_awq_on_average(base, form):
    awq, gptq, both = (errors(base, form, name)[:, 1] for name in ("awq", "gptq", "awq+gptq"))
    assert max(gptq.mean(), both.mean()) < 0.7 * awq.mean()

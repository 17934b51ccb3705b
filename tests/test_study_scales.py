"""Tests the ways to find block scales that `scripts/study_scales.py` compares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.checkpoint.hf_folder import TINY
from scripts import study_scales

PARTS = [jax.random.normal(jax.random.key(n), (n, 64)).astype(jnp.bfloat16) for n in (8, 24)]


def errors(round_):
    return np.concatenate(
        [
            np.float32(found) - np.float32(part)
            for part, found in zip(PARTS, round_(PARTS), strict=True)
        ]
    )


@pytest.mark.slow
def test_squares_with_clipping_are_what_the_library_does():
    library = study_scales.to_nearest("nvfp4", "search")
    np.testing.assert_array_equal(errors(study_scales.searched(2)), errors(library))


def test_each_search_makes_its_own_error_smallest():
    of_powers = {power: errors(study_scales.searched(power)) for power in (2, 4)}
    for power, own in of_powers.items():
        other = of_powers[6 - power]
        assert (np.abs(own) ** power).sum() < (np.abs(other) ** power).sum()
    unclipped = errors(study_scales.searched(2, clips=False))
    assert (of_powers[2] ** 2).sum() < (unclipped**2).sum()


def test_an_orthogonal_error_has_no_part_along_the_matrix():
    round_ = study_scales.orthogonal(study_scales.to_nearest("nvfp4", "search"))
    for part, found in zip(PARTS, round_(PARTS), strict=True):
        part = np.float64(part)
        assert abs(np.vdot(np.float64(found) - part, part)) < 1e-6 * np.vdot(part, part)


@pytest.mark.slow
def test_the_table_has_a_line_for_each_way(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "3+4?", "answer": "7"}\n' * 3)
    ways = ["NVFP4, maximum", "NVFP4, cubes"]
    study_scales.main([str(TINY), str(rows), "--rows", "2", "--length", "64", "--ways", *ways])
    *_, whole, nearest, cubes = capsys.readouterr().out.splitlines()
    assert whole.startswith("| 16 bits | 0.0000 |")
    assert nearest.startswith("| NVFP4, maximum | ") and cubes.startswith("| NVFP4, cubes | ")

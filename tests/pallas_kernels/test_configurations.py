"""Tests that configurations which no kernel could have are refused when they are made."""

import pytest

from pallas_kernels.decode_attention import config as attention
from pallas_kernels.nvfp4_matmul import decode_config as decode
from pallas_kernels.nvfp4_matmul import dequantize
from pallas_kernels.nvfp4_matmul import prefill_config as prefill
from pallas_kernels.portable import tuning as portable


@pytest.mark.parametrize(
    ("module", "values", "message"),
    [
        (attention, (0, 1, 1, 1), "pages must be 1 or more; got 0"),
        (attention, (4, 0, 1, 1), "stages must be 1 or more; got 0"),
        (attention, (1, 1, 0, 1), "parts must be 1 or more; got 0"),
        (attention, (1, 1, 1, 0), "blocks must be 1 or more; got 0"),
        (attention, (1, 1, 1, 1, 5), "warpgroups must be 1 to 4; got 5"),
        (decode, (0, 64, 2, 1), "warpgroups must be 1 to 4; got 0"),
        (decode, (1, 96, 2, 1), "step must be 64, 128 or 256; got 96"),
        (decode, (1, 64, 1, 1), "stages must be 2 or more; got 1"),
        (decode, (1, 64, 2, 0), "blocks must be 1 or more; got 0"),
        (dequantize, {"step": 96}, "step must be 64, 128 or 256; got 96"),
        (dequantize, {"stages": 1}, "stages must be 2 or more; got 1"),
        (dequantize, {"blocks": 0}, "blocks must be 1 or more; got 0"),
        (prefill, (100,), "rows must be a multiple of 8 up to 256; got 100"),
        (prefill, (264,), "rows must be a multiple of 8 up to 256; got 264"),
        (prefill, (64, 4), "warpgroups must be 1 to 3; got 4"),
        (prefill, {"rows": 64, "cluster": 3}, "cluster must be 1 or 2; got 3"),
        (prefill, {"rows": 72, "cluster": 2}, "rows must be in sixteens for two blocks; got 72"),
        (prefill, {"rows": 168, "producer": True}, "a producer leaves registers for 160 rows"),
        (prefill, (64, 1, 2), "stages must be 3 or more; got 2"),
        (prefill, {"rows": 64, "stages": 1, "producer": True}, "stages must be 2 or more; got 1"),
        (prefill, {"rows": 64, "split": 0}, "split must be 1 or more; got 0"),
        (prefill, {"rows": 64, "band": 0}, "band must be 1 or more; got 0"),
        (portable, {"block_n": 48}, "block_n"),
        (portable, {"units": 3}, "units"),
        (portable, {"warps": 3}, "warps"),
        (portable, {"split": 0}, "split"),
        (portable, {"stages": 0}, "stages"),
    ],
)
def test_impossible_configurations_cannot_be_made(module, values, message):
    with pytest.raises(ValueError, match=message):
        module.Config(**values) if isinstance(values, dict) else module.Config(*values)

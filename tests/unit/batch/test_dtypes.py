from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch.dtypes import BITS, decoded, storage
from tests.cases import each_case


@given(st.text(max_size=12))
def test_any_name_gives_a_dtype_of_numbers_or_is_refused(name: str) -> None:
    try:
        dtype = storage(name)
    except ValueError:
        return
    assert dtype.kind in "biufcmM"


@each_case("name", [name for name in BITS if name != "float4_e2m1fn_x2" and hasattr(torch, name)])
def test_decoded_bits_agree_with_torch(name: str) -> None:
    count = {1: 256, 2: 1 << 16, 4: 1 << 16}[storage(name).itemsize]
    codes = np.arange(count, dtype=np.int64) * (1 if count == 256 or storage(name).itemsize == 2 else 65537)
    codes = codes.astype(storage(name))
    tensor = torch.from_numpy(codes.view(f"i{codes.itemsize}")).view(getattr(torch, name))
    wide = tensor.to(torch.complex64 if name == "complex32" else torch.float64).numpy()
    np.testing.assert_array_equal(decoded(name, codes), wide)

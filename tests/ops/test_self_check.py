"""Where there is a C compiler, every library is compiled, equals the reference, and is used.

Tests of compiled kernels are skipped where a library is refused, so a kernel that its self-check refuses would go
unnoticed without this."""

import pytest

from tracefp4.errors import BackendError
from tracefp4.ops.backend import IMPLEMENTED, Backend, choose


@pytest.mark.parametrize("op", [op for op, backends in IMPLEMENTED.items() if Backend.COMPILED in backends])
def test_a_library_is_refused_only_for_want_of_a_compiler(op):
    try:
        assert choose(op, "cpu", Backend.COMPILED) is Backend.COMPILED
    except BackendError as refusal:
        if "no C compiler" in str(refusal):
            pytest.skip(str(refusal))
        raise

"""The chain of engine and trainer that several files hold to one set of bytes: made once a file, only read."""

import pytest
from tests.parity.chains import make_chain


@pytest.fixture(scope="module")
def chain():
    return make_chain()


@pytest.fixture(scope="module")
def rollouts(chain):
    return chain.rollouts()

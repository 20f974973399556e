from tests.integration.conftest import _workers as _workers
from tests.integration.conftest import node as node

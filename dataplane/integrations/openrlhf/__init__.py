"""OpenRLHF: its controller passes data to its workers by reference, and pixels leave the rollout worker once.

`install` changes the groups of workers (`hook`), `LazyInputs` is a mixin of an agent executor (`agent`), and `put`,
`get` and `free` take an Experience (`experience`). The import of this package imports neither OpenRLHF nor Ray nor
torch.
"""

from dataplane.integrations.openrlhf.agent import LazyInputs as LazyInputs
from dataplane.integrations.openrlhf.hook import install as install
from dataplane.integrations.openrlhf.hook import uninstall as uninstall
from dataplane.integrations.openrlhf.remote import RemoteExperience as RemoteExperience
from dataplane.integrations.openrlhf.remote import free as free
from dataplane.integrations.openrlhf.remote import get as get
from dataplane.integrations.openrlhf.remote import put as put

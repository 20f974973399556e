"""The metas under the name of the module that TransferQueue has them in."""

from dataplane.integrations.transfer_queue.kvmeta import KVBatchMeta
from dataplane.integrations.transfer_queue.meta import BatchMeta
from dataplane.integrations.transfer_queue.values import schema_of as extract_field_schema

__all__ = ["BatchMeta", "KVBatchMeta", "extract_field_schema"]

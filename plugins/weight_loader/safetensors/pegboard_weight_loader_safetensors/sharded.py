"""Weight loader `sharded_state`: each rank maps its own files, which hold only its share."""

from __future__ import annotations

from pegboard_weights.sharded_state import ShareLoader


class ShardedStateLoader(ShareLoader):
    format = "sharded_state"

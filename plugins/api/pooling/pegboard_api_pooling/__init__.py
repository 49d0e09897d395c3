"""The api `pooling`: vectors over HTTP."""

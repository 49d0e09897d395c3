"""What KV connectors share. Import from the submodules."""

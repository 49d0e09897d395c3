"""Discovery, selection with reasons, options, hooks and the lock. These modules know kinds, but no
plugin's name."""

"""Discovery, selection with reasons, options, hooks and the lock. Knows kinds; spells no plugin's name."""

"""Compiled programs on disk: `key` says what a program depends on, `form` how one is written down, `store` where."""

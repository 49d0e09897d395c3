"""What model plugins share. Import from the submodules."""

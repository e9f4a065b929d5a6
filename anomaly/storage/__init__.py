"""Model folders: written whole or not at all, read with every file checked."""

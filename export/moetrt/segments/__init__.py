"""Segments: the runs of nodes that one plugin node replaces, found from their seed and grown as far as they go."""

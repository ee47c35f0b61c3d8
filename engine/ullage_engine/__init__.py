"""Engine of Ullage: a server process that never dies and workers that may."""

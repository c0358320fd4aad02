"""The ranks of a run as real processes, on nodes that Linux keeps apart: the engine `emulation`."""

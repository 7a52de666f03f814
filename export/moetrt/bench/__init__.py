"""The benchmark: a mapped file with the plugin and without it, timed by trtexec or by TensorRT's Python module."""

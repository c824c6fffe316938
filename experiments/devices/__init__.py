"""One training on a CPU and on a GPU, with other kernels and dtypes, and with mistakes: harmless or a bug?"""

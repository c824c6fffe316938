"""Sixteen faults in kernels, and three programs to put them in: does `crossframe explain` name the operator and the line?"""

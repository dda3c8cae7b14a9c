"""llama.cpp through llama-cpp-python's low-level functions: files, weights, context, vocabulary, conversion.

Nothing here imports torch; the interpreter may have the standard library, numpy and llama_cpp only.
"""

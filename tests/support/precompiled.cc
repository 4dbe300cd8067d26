// Nothing: the target of this file only carries the precompiled headers of tests/CMakeLists.txt.

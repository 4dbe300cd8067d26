// Empty. Its target only holds the precompiled headers of tests/CMakeLists.txt.

"""The version of the project in CMakeLists.txt, which the clients need without the library."""

VERSION = "0.1.0"

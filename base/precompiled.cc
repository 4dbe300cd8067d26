// Empty. Targets of precompiled headers need a source file.

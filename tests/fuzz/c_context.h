// The context in which the fuzz targets of the C interface compute.
#ifndef RAPT_TESTS_FUZZ_C_CONTEXT_H_
#define RAPT_TESTS_FUZZ_C_CONTEXT_H_

#include <rapt/attention.h>

#include "base/check.h"

// Made by the first call, with two threads.
inline rapt_context& TheContext() {
  static rapt_context* const context = [] {
    rapt_context_options options = {};
    options.struct_size = sizeof(options);
    options.threads = 2;
    rapt_context* created = nullptr;
    RAPT_CHECK(rapt_context_create(&options, &created, nullptr, 0) == RAPT_OK, "no context");
    return created;
  }();
  return *context;
}

#endif  // RAPT_TESTS_FUZZ_C_CONTEXT_H_

// What reading a layer's files costs, known before they are read.
#ifndef RAPT_ATTENTION_LAYER_FILES_READING_MEMORY_H_
#define RAPT_ATTENTION_LAYER_FILES_READING_MEMORY_H_

#include <cstdint>
#include <string>

namespace rapt {

// Returns the memory that ReadLayerFiles() takes for a folder, at most: a multiple of the bytes of
// config.json and of the indices of the weights. 0 for files that are missing, which cost nothing.
int64_t ReadingBytes(const std::string& folder);

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_FILES_READING_MEMORY_H_

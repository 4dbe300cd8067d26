# Finds the headers of the cuDNN backend: cuDNN 9, the CUDA 13 runtime and its run-time compiler, and NVIDIA's C++
# frontend of cuDNN. Searches no library, as none is linked. CMake's own FindCUDAToolkit requires the compiler nvcc,
# which NVIDIA's Python packages lack.
#
# The headers come from `./dev build --cudnn`, which installs the packages into build/cudnn, or from the system's and
# CUDA's directories. Defines CUDNNFrontend_FOUND, CUDNNFrontend_LIBRARY_DIRS if the packages include libraries, and
# the target CUDNNFrontend::headers.
file(GLOB _packages ${PROJECT_SOURCE_DIR}/build/cudnn/lib/python3*/site-packages)
set(_hints ${_packages}/include ${_packages}/nvidia/cudnn/include ${_packages}/nvidia/cu13/include
  /usr/local/cuda/include)
set(_variables "")
foreach(_header cudnn_version.h cuda_runtime_api.h crt/host_defines.h nvrtc.h cudnn_frontend.h)
  string(MAKE_C_IDENTIFIER ${_header} _name)
  find_path(CUDNNFrontend_${_name}_DIR ${_header} HINTS ${_hints})
  mark_as_advanced(CUDNNFrontend_${_name}_DIR)
  list(APPEND _variables CUDNNFrontend_${_name}_DIR)
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CUDNNFrontend REQUIRED_VARS ${_variables})

if(CUDNNFrontend_FOUND AND NOT TARGET CUDNNFrontend::headers)
  add_library(CUDNNFrontend::headers INTERFACE IMPORTED GLOBAL)
  foreach(_variable ${_variables})
    target_include_directories(CUDNNFrontend::headers SYSTEM INTERFACE ${${_variable}})
  endforeach()
endif()
set(CUDNNFrontend_LIBRARY_DIRS "")
foreach(_folder nvidia/cudnn/lib nvidia/cu13/lib)
  if(_packages AND EXISTS ${_packages}/${_folder})
    list(APPEND CUDNNFrontend_LIBRARY_DIRS ${_packages}/${_folder})
  endif()
endforeach()

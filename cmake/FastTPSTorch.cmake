# Defines the target fasttps::torch: the headers and libraries of one PyTorch, which is in this order
#   the target `torch`, where the project called find_package(Torch) itself,
#   Torch_DIR, Torch_ROOT, CMAKE_PREFIX_PATH (a LibTorch, or torch.utils.cmake_prefix_path),
#   the hints in FASTTPS_TORCH_HINTS.
# Sets FASTTPS_TORCH_FOUND, FASTTPS_TORCH_DIR, FASTTPS_TORCH_VERSION (major.minor.patch).
#
# find_package(Torch) is not called here: with a CUDA build of PyTorch it demands the CUDA toolkit,
# of which these ops use nothing.

set(FASTTPS_TORCH_FOUND FALSE)

if(TARGET torch AND DEFINED TORCH_INSTALL_PREFIX)
  set(_fasttps_torch_config_dir "${TORCH_INSTALL_PREFIX}/share/cmake")
else()
  find_path(
    FASTTPS_TORCH_CONFIG_DIR Torch/TorchConfig.cmake
    HINTS ${Torch_DIR}/.. ${Torch_ROOT} ${CMAKE_PREFIX_PATH} ${FASTTPS_TORCH_HINTS}
    PATH_SUFFIXES share/cmake torch/share/cmake
    NO_CACHE NO_DEFAULT_PATH)
  set(_fasttps_torch_config_dir "${FASTTPS_TORCH_CONFIG_DIR}")
  unset(FASTTPS_TORCH_CONFIG_DIR)
endif()

if(_fasttps_torch_config_dir)
  get_filename_component(FASTTPS_TORCH_DIR "${_fasttps_torch_config_dir}/../.." ABSOLUTE)
  file(STRINGS "${FASTTPS_TORCH_DIR}/include/torch/csrc/api/include/torch/version.h" _fasttps_lines
       REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  if(NOT _fasttps_lines)
    file(STRINGS "${FASTTPS_TORCH_DIR}/include/torch/headeronly/version.h" _fasttps_lines
         REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  endif()
  string(REGEX REPLACE "[^;0-9]" "" _fasttps_numbers "${_fasttps_lines}")
  string(REPLACE ";" "." FASTTPS_TORCH_VERSION "${_fasttps_numbers}")
  set(FASTTPS_TORCH_FOUND TRUE)
endif()
unset(_fasttps_torch_config_dir)
unset(_fasttps_lines)
unset(_fasttps_numbers)

if(FASTTPS_TORCH_FOUND AND NOT TARGET fasttps::torch)
  add_library(fasttps::torch INTERFACE IMPORTED)
  target_compile_features(fasttps::torch INTERFACE cxx_std_20)
  if(TARGET torch)
    target_link_libraries(fasttps::torch INTERFACE torch)
  else()
    target_include_directories(
      fasttps::torch INTERFACE "${FASTTPS_TORCH_DIR}/include"
                               "${FASTTPS_TORCH_DIR}/include/torch/csrc/api/include")
    target_link_libraries(fasttps::torch INTERFACE "${FASTTPS_TORCH_DIR}/lib/libtorch_cpu.so"
                                                   "${FASTTPS_TORCH_DIR}/lib/libc10.so")
  endif()
endif()

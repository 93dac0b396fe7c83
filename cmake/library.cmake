# libfasttps.so, the Python module fasttps._C, and how both are installed into a package folder:
#   _C*.so  lib/  include/fasttps/  share/cmake/fasttps/

find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)

# Where Python has torch, without importing it, and the full version (2.13.0+cpu).
execute_process(
  COMMAND
    "${Python_EXECUTABLE}" -c
    "import importlib.util as u, os; s = u.find_spec('torch'); print(os.path.dirname(os.path.realpath(s.origin)) if s else '')"
  OUTPUT_VARIABLE python_torch OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
set(FASTTPS_TORCH_HINTS "${python_torch}")
include("${CMAKE_CURRENT_LIST_DIR}/FastTPSTorch.cmake")
if(NOT FASTTPS_TORCH_FOUND)
  message(FATAL_ERROR "fasttps: ${Python_EXECUTABLE} has no torch; install torch first, then build "
                      "with `pip install --no-build-isolation .`")
endif()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${FASTTPS_TORCH_DIR}/version.py")
set(FASTTPS_TORCH_FULL_VERSION "${FASTTPS_TORCH_VERSION}")
if(EXISTS "${FASTTPS_TORCH_DIR}/version.py")
  file(STRINGS "${FASTTPS_TORCH_DIR}/version.py" line REGEX "^__version__ *=")
  string(REGEX REPLACE ".*['\"](.*)['\"].*" "\\1" FASTTPS_TORCH_FULL_VERSION "${line}")
endif()
message(STATUS "fasttps: torch ${FASTTPS_TORCH_FULL_VERSION} in ${FASTTPS_TORCH_DIR}")

file(GLOB sources CONFIGURE_DEPENDS csrc/ops/*.cpp csrc/cpu/*.cpp csrc/cpu/limits/*.cpp
     csrc/cpu/register/*.cpp)
list(FILTER sources EXCLUDE REGEX "/csrc/cpu/(bf16_choice|isa_list|usable_cpus)\\.cpp$")
add_library(fasttps SHARED ${sources} $<TARGET_OBJECTS:fasttps_cpu_kernels>
                           $<TARGET_OBJECTS:fasttps_cpu_limits>)
target_compile_definitions(fasttps PRIVATE $<$<BOOL:${FASTTPS_X86}>:FASTTPS_X86>)
target_include_directories(
  fasttps PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/csrc> $<INSTALL_INTERFACE:include>)
target_link_libraries(fasttps PUBLIC fasttps::torch PRIVATE fasttps_warnings)

# at::parallel_for is an OpenMP loop in a header: without -fopenmp it runs on one thread. At run time
# there must be one OpenMP runtime only, torch's own, so that file is linked and not the compiler's.
target_compile_options(fasttps PRIVATE -fopenmp)
file(GLOB torch_openmp "${FASTTPS_TORCH_DIR}/lib/libgomp*.so*"
     "${FASTTPS_TORCH_DIR}/../torch.libs/libgomp*.so*")
if(torch_openmp)
  list(GET torch_openmp 0 torch_openmp)
  target_link_libraries(fasttps PRIVATE "${torch_openmp}")
else()
  target_link_options(fasttps PRIVATE -fopenmp)
endif()

find_package(pybind11 QUIET CONFIG)
if(NOT pybind11_FOUND)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
    OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  find_package(pybind11 REQUIRED CONFIG)
endif()
pybind11_add_module(fasttps_python MODULE NO_EXTRAS csrc/python/limits.cpp csrc/python/module.cpp
                    csrc/python/module_watch.cpp)
target_link_libraries(fasttps_python PRIVATE fasttps fasttps_warnings)
set_target_properties(fasttps_python PROPERTIES OUTPUT_NAME _C INSTALL_RPATH "$ORIGIN/lib")

list(TRANSFORM FASTTPS_ISAS REPLACE "(.+)" "\"\\1\"" OUTPUT_VARIABLE FASTTPS_ISAS_JSON)
list(JOIN FASTTPS_ISAS_JSON ", " FASTTPS_ISAS_JSON)
configure_file(cmake/build_facts.json.in build_facts.json @ONLY)
file(READ "${CMAKE_CURRENT_BINARY_DIR}/build_facts.json" FASTTPS_BUILD_FACTS)
configure_file(cmake/build_facts.h.in generated/build_facts.h @ONLY)
target_include_directories(fasttps_python PRIVATE "${CMAKE_CURRENT_BINARY_DIR}/generated")

# In an environment torch stands beside fasttps. Built in place, it may be anywhere.
set(FASTTPS_TORCH_HINT "")
set(rpath "$ORIGIN/../../torch/lib")
if(FASTTPS_IN_PLACE)
  set(FASTTPS_TORCH_HINT "${FASTTPS_TORCH_DIR}")
  list(APPEND rpath "${FASTTPS_TORCH_DIR}/lib")
endif()
set_target_properties(fasttps PROPERTIES INSTALL_RPATH "${rpath}")

include(CMakePackageConfigHelpers)
set(package_dir share/cmake/fasttps)
configure_package_config_file(
  cmake/fasttpsConfig.cmake.in fasttpsConfig.cmake INSTALL_DESTINATION ${package_dir}
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(fasttpsConfigVersion.cmake COMPATIBILITY SameMinorVersion)

install(TARGETS fasttps EXPORT fasttpsTargets LIBRARY DESTINATION lib)
install(TARGETS fasttps_python LIBRARY DESTINATION .)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/build_facts.json" DESTINATION lib)
install(FILES csrc/ops/fasttps.h csrc/ops/packed_format.h DESTINATION include/fasttps)
install(EXPORT fasttpsTargets NAMESPACE fasttps:: DESTINATION ${package_dir})
install(
  FILES "${CMAKE_CURRENT_BINARY_DIR}/fasttpsConfig.cmake"
        "${CMAKE_CURRENT_BINARY_DIR}/fasttpsConfigVersion.cmake" cmake/FastTPSTorch.cmake
  DESTINATION ${package_dir})

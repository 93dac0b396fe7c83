# Programs for arrays of tiles, the machines that run them, and the simulator: torch-free.
find_package(nlohmann_json 3.9 QUIET)
if(NOT nlohmann_json_FOUND)
  message(FATAL_ERROR "fasttps: nlohmann's JSON is missing; install it with "
                      "`apt-get install nlohmann-json3-dev`")
endif()

# The machines' texts, as machines/<name>.json has them, lie in the library.
set(machine_texts "${CMAKE_CURRENT_BINARY_DIR}/generated/machine_texts.cpp")
file(GLOB machines CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/npu/machines/*.json")
file(GLOB fits CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/npu/machines/fits/*.json")
add_custom_command(
  OUTPUT "${machine_texts}"
  COMMAND "${CMAKE_COMMAND}" "-DOUT=${machine_texts}" "-DMACHINES=${machines}" "-DFITS=${fits}" -P
          "${PROJECT_SOURCE_DIR}/cmake/embed_machines.cmake"
  DEPENDS ${machines} ${fits} "${PROJECT_SOURCE_DIR}/cmake/embed_machines.cmake"
  VERBATIM)

file(GLOB npu_sources CONFIGURE_DEPENDS csrc/npu/*.cpp csrc/npu/kernels/*.cpp csrc/npu/sim/*.cpp
     csrc/npu/ops/*.cpp)
add_library(fasttps_npu OBJECT ${npu_sources} "${machine_texts}")
target_include_directories(fasttps_npu PUBLIC "${PROJECT_SOURCE_DIR}/csrc"
                                              "${PROJECT_SOURCE_DIR}/csrc/npu/aie_api")
# As a core multiplies and adds: no fused product rounds less often.
file(GLOB npu_kernels CONFIGURE_DEPENDS csrc/npu/kernels/*.cpp)
set_source_files_properties(${npu_kernels} PROPERTIES COMPILE_OPTIONS "-O3;-ffp-contract=off")
target_link_libraries(fasttps_npu PRIVATE fasttps_warnings nlohmann_json::nlohmann_json)
set_target_properties(fasttps_npu PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)

if(FASTTPS_TESTS)
  find_package(GTest REQUIRED)
  file(GLOB npu_tests CONFIGURE_DEPENDS csrc/npu/tests/*.cpp)
  add_executable(fasttps_npu_tests ${npu_tests} $<TARGET_OBJECTS:fasttps_npu>)
  target_include_directories(fasttps_npu_tests PRIVATE "${PROJECT_SOURCE_DIR}/csrc"
                                                       "${PROJECT_SOURCE_DIR}/csrc/npu/aie_api")
  target_link_libraries(fasttps_npu_tests PRIVATE GTest::gmock_main fasttps_warnings
                                                  nlohmann_json::nlohmann_json)
endif()

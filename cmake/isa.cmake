# One object file per instruction set. Their flags appear here and on those files alone: code that
# every CPU runs must never be compiled for a CPU that only some people have.

# fasttps_add_isa(<name> FLAGS...): csrc/cpu/isa/<name>.cpp, compiled with FLAGS.
function(fasttps_add_isa name)
  set(source "${PROJECT_SOURCE_DIR}/csrc/cpu/isa/${name}.cpp")
  target_sources(fasttps_cpu_kernels PRIVATE "${source}")
  # -ffp-contract=off: an fma is written where it is meant, so that compilers round alike.
  # Under a sanitizer -O1 compiles in a quarter of the time.
  set(level -O3)
  if(FASTTPS_SANITIZE)
    set(level -O1)
  endif()
  set_source_files_properties(
    "${source}" TARGET_DIRECTORY fasttps_cpu_kernels
    PROPERTIES COMPILE_OPTIONS "${level};-ffp-contract=off;-fno-math-errno;-fvisibility=hidden;${ARGN}")
  set(FASTTPS_ISAS ${FASTTPS_ISAS} ${name} PARENT_SCOPE)
endfunction()

# fasttps_add_limits(<name> FLAGS...): csrc/cpu/limits/isa/<name>.cpp, loops that only measure.
function(fasttps_add_limits name)
  set(source "${PROJECT_SOURCE_DIR}/csrc/cpu/limits/isa/${name}.cpp")
  target_sources(fasttps_cpu_limits PRIVATE "${source}")
  set_source_files_properties(
    "${source}" TARGET_DIRECTORY fasttps_cpu_limits
    PROPERTIES COMPILE_OPTIONS "-O3;-ffp-contract=off;-fvisibility=hidden;${ARGN}")
endfunction()

# Torch-free: the kernels, the list of their tables, and what chooses among them by CPUID.
add_library(
  fasttps_cpu_kernels OBJECT "${PROJECT_SOURCE_DIR}/csrc/cpu/bf16_choice.cpp"
                             "${PROJECT_SOURCE_DIR}/csrc/cpu/isa_list.cpp"
                             "${PROJECT_SOURCE_DIR}/csrc/cpu/usable_cpus.cpp")
target_include_directories(fasttps_cpu_kernels PUBLIC "${PROJECT_SOURCE_DIR}/csrc")
target_compile_definitions(fasttps_cpu_kernels PUBLIC $<$<BOOL:${FASTTPS_X86}>:FASTTPS_X86>)
target_link_libraries(fasttps_cpu_kernels PRIVATE fasttps_warnings)
set_target_properties(fasttps_cpu_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON)

set(avx2 -mavx2 -mfma -mf16c)
set(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl ${avx2})
set(avx512_bf16 ${avx512} -mavx512bf16 -mavx512vnni)
set(avx512_amx ${avx512_bf16} -mamx-tile -mamx-bf16 -mamx-int8)

fasttps_add_isa(scalar)
if(FASTTPS_X86)
  fasttps_add_isa(avx2 ${avx2})
  fasttps_add_isa(avx512 ${avx512})
  fasttps_add_isa(avx512_bf16 ${avx512_bf16})
  fasttps_add_isa(avx512_amx ${avx512_amx})
endif()

# The loops of the ruler (csrc/cpu/limits), for which only the library has a use.
if(FASTTPS_TORCH)
  add_library(fasttps_cpu_limits OBJECT)
  target_compile_definitions(fasttps_cpu_limits PUBLIC $<$<BOOL:${FASTTPS_X86}>:FASTTPS_X86>)
  target_link_libraries(fasttps_cpu_limits PRIVATE fasttps_warnings)
  set_target_properties(fasttps_cpu_limits PROPERTIES POSITION_INDEPENDENT_CODE ON)
  fasttps_add_limits(scalar)
  if(FASTTPS_X86)
    fasttps_add_limits(avx2 ${avx2})
    fasttps_add_limits(avx512 ${avx512})
    fasttps_add_limits(avx512_bf16 ${avx512_bf16})
    fasttps_add_limits(avx512_fp16 ${avx512} -mavx512fp16)
  endif()
endif()

# find_package(my_ops) defines my_ops::my_ops: the headers, torch's C++ libraries, and the module that
# registers the operators when the program starts. No Python and no CUDA toolkit is needed.
get_filename_component(_my_ops "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(my_ops_LIBRARY "${_my_ops}/_C.so")
if(NOT EXISTS "${my_ops_LIBRARY}")
  set(my_ops_FOUND FALSE)
  set(my_ops_NOT_FOUND_MESSAGE "${my_ops_LIBRARY} is missing: this is the source folder of my_ops")
  return()
endif()

# Uses the torch that the program has found, or else its folder, in the prefixes or beside this package.
# Does not use torch's own CMake package, because that of CUDA builds stops if there is no CUDA toolkit.
if(TARGET torch)
  set(_my_ops_torch torch)
else()
  find_path(my_ops_TORCH lib/libtorch.so PATHS ${CMAKE_PREFIX_PATH} "${_my_ops}/../torch"
    PATH_SUFFIXES ../.. NO_DEFAULT_PATH)  # ../..: from torch.utils.cmake_prefix_path
  if(NOT my_ops_TORCH)
    set(my_ops_FOUND FALSE)
    set(my_ops_NOT_FOUND_MESSAGE "no lib/libtorch.so in the folders of CMAKE_PREFIX_PATH")
    return()
  endif()
  set(_my_ops_include "${my_ops_TORCH}/include" "${my_ops_TORCH}/include/torch/csrc/api/include")
  set(_my_ops_torch torch torch_cpu c10)
  list(TRANSFORM _my_ops_torch REPLACE "(.+)" "${my_ops_TORCH}/lib/lib\\1.so")
endif()

if(NOT TARGET my_ops::my_ops)
  add_library(my_ops::my_ops INTERFACE IMPORTED)
  set_target_properties(my_ops::my_ops PROPERTIES
    INTERFACE_COMPILE_FEATURES cxx_std_20
    INTERFACE_INCLUDE_DIRECTORIES "${_my_ops}/include;${_my_ops_include}"
    # The program calls nothing in the module by name, so without the first option linkers may drop it.
    # The module has no soname: linked by its path, a program would look for it at that path alone.
    INTERFACE_LINK_OPTIONS "-Wl,--no-as-needed;-L${_my_ops};-l:_C.so;-Wl,-rpath,${_my_ops}"
    INTERFACE_LINK_LIBRARIES "${_my_ops_torch}")
endif()

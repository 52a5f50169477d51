# find_package(my_ops) defines my_ops::my_ops: the header, torch, and the module that registers the
# operators when the program starts. No Python is needed.
include(CMakeFindDependencyMacro)
find_dependency(Torch)

get_filename_component(_my_ops "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(my_ops_LIBRARY "${_my_ops}/_C.so")
if(NOT EXISTS "${my_ops_LIBRARY}")
  set(my_ops_FOUND FALSE)
  set(my_ops_NOT_FOUND_MESSAGE "${my_ops_LIBRARY} is missing: this is the source folder of my_ops")
  return()
endif()

if(NOT TARGET my_ops::my_ops)
  add_library(my_ops::my_ops INTERFACE IMPORTED)
  set_target_properties(my_ops::my_ops PROPERTIES
    INTERFACE_COMPILE_FEATURES cxx_std_20
    INTERFACE_INCLUDE_DIRECTORIES "${_my_ops}/include"
    # The program calls nothing in the module by name: without the option, linkers may drop it.
    INTERFACE_LINK_OPTIONS "-Wl,--no-as-needed;${my_ops_LIBRARY}"
    INTERFACE_LINK_LIBRARIES torch)
endif()

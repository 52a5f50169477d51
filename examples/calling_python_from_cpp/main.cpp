// A C++ program that holds a Python interpreter: imports a module, calls it, survives its errors.
#include <pybind11/embed.h>
#include <pybind11/stl.h>

#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace py = pybind11;

namespace {

// The interpreter of PYTHON's environment, so that import finds what is installed there.
PyConfig configuration() {
  PyConfig config;
  PyConfig_InitPythonConfig(&config);
  config.install_signal_handlers = 0;  // Ctrl-C stays the program's
  const PyStatus status = PyConfig_SetBytesString(&config, &config.program_name, PYTHON);
  if (PyStatus_Exception(status)) throw std::runtime_error(status.err_msg);
  return config;
}

std::vector<double> d_sigmoid(const std::vector<double>& z) {
  const py::gil_scoped_acquire gil;  // any thread may call
  const py::object tensor = py::module_::import("torch").attr("tensor")(z);
  const py::object result = py::module_::import("my_ops").attr("d_sigmoid")(tensor);
  return result.attr("tolist")().cast<std::vector<double>>();
}

// A Python exception as a C++ one that holds no Python object, so that it may outlive the lock.
template <typename F>
auto translated(const F& call) {
  try {
    return call();
  } catch (const py::error_already_set& error) {
    throw std::runtime_error(error.what());  // what() and the destructor take the lock themselves
  }
}

void run() {
  PyConfig config = configuration();
  const py::scoped_interpreter interpreter(&config);  // ends when every py::object below is gone
  // Other threads can run Python only while this one does not hold the lock.
  const py::gil_scoped_release unlocked;

  std::cout << "d_sigmoid(0) = " << translated([] { return d_sigmoid({0.0}); }).at(0) << '\n';

  double from_thread = 0.0;
  std::exception_ptr failure;
  std::thread worker([&] {
    try {
      from_thread = translated([] { return d_sigmoid({0.0, 0.0}); }).at(1);
    } catch (...) {
      failure = std::current_exception();  // an exception that leaves a thread ends the program
    }
  });
  worker.join();
  if (failure) std::rethrow_exception(failure);
  std::cout << "from a thread: " << from_thread << '\n';

  try {
    translated([] {
      const py::gil_scoped_acquire gil;
      py::module_::import("my_ops").attr("d_sigmoid")("no tensor");
    });
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    std::cout << text.substr(0, text.find('\n')) << '\n';  // the traceback follows
  }
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}

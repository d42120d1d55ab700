// The Python module that loads a library of operators: it has no members, importing it runs the
// registrations.
#include <Python.h>

#define NV_CONCAT_(a, b) a##b
#define NV_CONCAT(a, b) NV_CONCAT_(a, b)
#define NV_STRING_(x) #x
#define NV_STRING(x) NV_STRING_(x)

extern "C" __attribute__((visibility("default"))) PyObject* NV_CONCAT(PyInit_, TORCH_EXTENSION_NAME)(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, NV_STRING(TORCH_EXTENSION_NAME), nullptr, -1, nullptr};
  return PyModule_Create(&module);
}

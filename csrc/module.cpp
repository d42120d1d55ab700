// The Python module that loads a library of operators: importing it runs the registrations. Its one member,
// of the CUDA library only, is `cuda_archs`: the architectures that it was compiled for.
#include <Python.h>

#define NV_CONCAT_(a, b) a##b
#define NV_CONCAT(a, b) NV_CONCAT_(a, b)
#define NV_STRING_(x) #x
#define NV_STRING(x) NV_STRING_(x)

extern "C" __attribute__((visibility("default"))) PyObject* NV_CONCAT(PyInit_, TORCH_EXTENSION_NAME)(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, NV_STRING(TORCH_EXTENSION_NAME), nullptr, -1, nullptr};
  PyObject* self = PyModule_Create(&module);
#ifdef NV_CUDA_ARCHS
  if (self != nullptr) PyModule_AddStringConstant(self, "cuda_archs", NV_CUDA_ARCHS);
#endif
  return self;
}

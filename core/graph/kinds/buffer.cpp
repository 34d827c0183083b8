// SPDX-License-Identifier: Apache-2.0
// Memory that holds no objects: a bytearray, an array.array, a NumPy array of text, bytes or dates. Its content is
// static, and can be changed in place. The payload is a plain value that a new one is made from.
#include <cstring>

#include "graph/commit.h"
#include "graph/rebuild.h"
#include "graph/static_equality.h"
#include "graph/swap_contents.h"
#include "python/hooks.h"

namespace graftax {

namespace {

struct BufferKind : NodeKind {
  BufferKind() : NodeKind("buffer", Items::none) { has_content = is_leaf_for_jax = true; }

  virtual Owned content_of(PyObject* obj) const = 0;

  uint32_t add_payload(Program& p, PyObject* obj, const Kind&) const override {
    return add_key(p, content_of(obj).get());
  }
  bool content_matches(const Program& p, const Instr& n, PyObject* obj) const override {
    return equal(content_of(obj).get(), p.statics[n.node->payload].obj);
  }
  bool content_changed(const Program& p, const Instr& n, PyObject* obj) const override {
    return !content_matches(p, n, obj);
  }
  std::string content_text(const Program& p, const Instr& n) const override {
    return static_text(p, n.node->payload) + (n.node->fields + n.node->slots ? ", " : "");
  }

  // Is the payload a tuple of `count` parts?
  static bool has_parts(const Program& p, const Instr& n, uint32_t count) {
    return n.node->payload != NONE && p.statics[n.node->payload].how == How::tuple &&
           p.statics[n.node->payload].count == count;
  }
};

// Bytes that can be resized, and written in place.
struct ResizableKind : BufferKind {
  // Content of the same size is written into the memory, where views of it see the change, as in plain Python.
  // Otherwise the memory is exchanged, which an exported view forbids.
  void write(Commit& commit, const Content& c, PyObject* node, const Touched&) const override {
    Owned content = new_items(c);
    if (size_of(content.get()) != size_of(node)) return commit.exchange(*this, node, std::move(content));
    Owned before = own(PyBytes_FromObject(node));
    auto copy = [node = Owned::borrow(node)](PyObject* source) {
      Py_buffer to, from;
      check(PyObject_GetBuffer(node.get(), &to, PyBUF_SIMPLE | PyBUF_WRITABLE));
      if (PyObject_GetBuffer(source, &from, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&to);
        raise_python();
      }
      if (to.len == from.len) memcpy(to.buf, from.buf, static_cast<size_t>(to.len));
      PyBuffer_Release(&to);
      PyBuffer_Release(&from);
    };
    commit.step([copy, content] { copy(content.get()); }, [copy, before] { copy(before.get()); });
  }

  static Py_ssize_t size_of(PyObject* obj) {
    Py_buffer view;
    check(PyObject_GetBuffer(obj, &view, PyBUF_SIMPLE));
    Py_ssize_t size = view.len;
    PyBuffer_Release(&view);
    return size;
  }

  static void refuse(Py_ssize_t views) {
    if (views > 0) raise_error(PyExc_BufferError, "Existing exports of data: object cannot be re-sized");
  }
};

struct ByteArrayKind final : ResizableKind {
  bool is_of(PyTypeObject* solid) const override { return solid == &PyByteArray_Type; }
  Owned content_of(PyObject* obj) const override {
    return own(PyBytes_FromStringAndSize(PyByteArray_AS_STRING(obj), PyByteArray_GET_SIZE(obj)));
  }
  // Without a copy of the content, as every walk asks this.
  bool content_matches(const Program& p, const Instr& n, PyObject* obj) const override {
    PyObject* content = p.statics[n.node->payload].obj;
    Py_ssize_t size = PyBytes_GET_SIZE(content);
    return PyByteArray_GET_SIZE(obj) == size &&
           memcmp(PyByteArray_AS_STRING(obj), PyBytes_AS_STRING(content), static_cast<size_t>(size)) == 0;
  }
  bool is_valid(const Program& p, const Instr& n) const override {
    return n.node->payload != NONE && p.statics[n.node->payload].how == How::bytes;
  }

  Owned new_items(const Content& c) const override {
    return own(PyByteArray_FromObject(c.program.statics[c.n.node->payload].obj));
  }
  void fill(const Content& c, PyObject* shell) const override { exchange(shell, new_items(c).get()); }
  bool can_exchange(PyObject* node) const override {
    refuse(reinterpret_cast<PyByteArrayObject*>(node)->ob_exports);
    return true;
  }
  void exchange(PyObject* a, PyObject* b) const override { exchange_bytearrays(a, b); }
};

// (type code, bytes) of an array.array.
struct ArrayKind final : ResizableKind {
  bool is_of(PyTypeObject* solid) const override { return solid == runtime.array_array_type; }
  Owned empty_arguments() const override { return own(Py_BuildValue("(s)", "b")); }
  Owned content_of(PyObject* obj) const override {
    Owned code = own(attribute(obj, "typecode"));
    return own(PyTuple_Pack(2, code.get(), call_base(runtime.array_array_type, "tobytes", obj).get()));
  }
  bool is_valid(const Program& p, const Instr& n) const override {
    if (!has_parts(p, n, 2)) return false;
    PyObject* content = p.statics[n.node->payload].obj;
    return PyUnicode_Check(PyTuple_GET_ITEM(content, 0)) && PyBytes_Check(PyTuple_GET_ITEM(content, 1));
  }

  Owned empty(const Program& p, const Instr& n, PyTypeObject* type) const {
    Owned args = own(PyTuple_Pack(1, PyTuple_GET_ITEM(p.statics[n.node->payload].obj, 0)));
    return own(runtime.array_array_type->tp_new(type, args.get(), nullptr));
  }
  Owned shell(const Program& p, const Instr& n, PyObject*) const override { return empty(p, n, n.node->type); }
  void fill(const Content& c, PyObject* shell) const override {
    call_base(runtime.array_array_type, "frombytes", shell,
              PyTuple_GET_ITEM(c.program.statics[c.n.node->payload].obj, 1));
  }
  Owned new_items(const Content& c) const override {
    Owned out = empty(c.program, c.n, runtime.array_array_type);
    fill(c, out.get());
    return out;
  }
  bool can_exchange(PyObject* node) const override {
    if (!knows_arrays()) return false;
    refuse(exports_of_array(node));
    return true;
  }
  void exchange(PyObject* a, PyObject* b) const override { exchange_arrays(a, b); }
  // By the base type's own methods, which a subclass may have overridden.
  Owned copy_items(PyObject* node) const override {
    return call_base(runtime.array_array_type, "__getitem__", node, all_items().get());
  }
  void replace_items(PyObject* node, PyObject* source) const override {
    call_base(runtime.array_array_type, "__delitem__", node, all_items().get());
    call_base(runtime.array_array_type, "extend", node, source);
  }
  static Owned all_items() { return own(PySlice_New(nullptr, nullptr, nullptr)); }
};

// (dtype, shape, bytes) of a NumPy array.
struct TextArrayKind final : BufferKind {
  Owned content_of(PyObject* obj) const override { return own(PyObject_CallOneArg(text_array_kind().reduce, obj)); }
  bool is_valid(const Program& p, const Instr& n) const override {
    if (!has_parts(p, n, 3)) return false;
    PyObject* content = p.statics[n.node->payload].obj;
    return PyUnicode_Check(PyTuple_GET_ITEM(content, 0)) && PyTuple_Check(PyTuple_GET_ITEM(content, 1)) &&
           PyBytes_Check(PyTuple_GET_ITEM(content, 2));
  }

  Owned shell(const Program& p, const Instr& n, PyObject*) const override {
    return hooks::text_array(p.statics[n.node->payload].obj);
  }
  static void write_array(PyObject* array, PyObject* content) { hooks::write_text_array(array, content); }
  void fill(const Content& c, PyObject* shell) const override {
    write_array(shell, c.program.statics[c.n.node->payload].obj);
  }
  void write(Commit& commit, const Content& c, PyObject* node, const Touched&) const override {
    auto put = [array = Owned::borrow(node)](const Owned& content) { write_array(array.get(), content.get()); };
    Owned before = content_of(node), after = Owned::borrow(c.program.statics[c.n.node->payload].obj);
    commit.step([put, after] { put(after); }, [put, before] { put(before); });
  }
};

const ByteArrayKind bytearray_kind;
const ArrayKind array_kind;
const TextArrayKind text_array_node_kind;

}  // namespace

const NodeKind& text_array_node = text_array_node_kind;

}  // namespace graftax

// pycoll._C: the engine as Python sees it. Conversions only; contracts are in the headers.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/calls/fast_path.h"
#include "bindings/calls/python_frame.h"
#include "bindings/owned_class.h"
#include "bindings/p2p/message_work.h"
#include "kernels/fold/fold.h"

namespace py = pybind11;
namespace pycoll {

namespace {

using Table = py::array_t<uint64_t, py::array::c_style | py::array::forcecast>;

template <typename T>
void unpack(const py::bytes& bytes, std::vector<T>& out) {
  const std::string_view view = bytes;
  out.resize(view.size() / sizeof(T));
  std::memcpy(out.data(), view.data(), out.size() * sizeof(T));
}

std::shared_ptr<Plan> make_plan(const py::bytes& code, const py::bytes& operands,
                                uint32_t world_size, uint32_t rank, uint32_t chunks, uint32_t slots,
                                uint32_t rounds, bool direct, bool messages) {
  auto plan = std::make_shared<Plan>();
  unpack(code, plan->code);
  unpack(operands, plan->operands);
  plan->world_size = world_size;
  plan->rank = rank;
  plan->chunks = chunks;
  plan->slots = slots;
  plan->rounds = rounds;
  plan->direct = direct;
  plan->messages = messages;
  plan->check();
  return plan;
}

PieceTable make_table(const Table& offset, const Table& length) {
  return {{offset.data(), offset.data() + offset.size()},
          {length.data(), length.data() + length.size()}};
}

std::shared_ptr<Engine> make_engine(std::shared_ptr<ControlSegment> control,
                                    std::shared_ptr<Heap> heap, uint32_t rank, double timeout_s,
                                    bool threads) {
  EngineOptions options;
  options.timeout_s = timeout_s;
  options.threads_as_ranks = threads;
  options.check_signals = check_signals;
  const Unlocked unlocked;
  return std::make_shared<Engine>(std::move(control), std::move(heap), rank, options);
}

py::dict rank_report(uint32_t rank, const RankReport& r, uint64_t iteration) {
  const uint64_t flag = r.flag[iteration & 1];
  py::dict out;
  out["rank"] = rank;
  out["phase"] = r.phase;
  out["alive"] = r.alive != 0;
  out["state"] = std::string(1, r.state);
  out["entered"] = r.entered != 0;
  out["pid"] = r.pid;
  out["position"] = static_cast<uint32_t>(flag >> 48);
  out["step"] = static_cast<uint32_t>(flag >> 32 & 0xFFFF);
  out["descriptor"] = r.descriptor;
  out["count"] = r.count;
  out["call_seq"] = r.call_seq;
  out["iteration"] = r.iteration;
  out["waiting_peer"] = r.waiting_peer;
  out["waiting_step"] = r.waiting_step;
  out["waiting_s"] = static_cast<double>(r.waiting_ns) * 1e-9;
  out["site"] = std::string(r.site);
  out["text"] = decoded(r.text);
  return out;
}

}  // namespace

void raise_in_python(const Error& error) {
  if (std::strcmp(error.kind(), "Interrupted") == 0 && PyErr_Occurred() != nullptr) return;
  if (std::strcmp(error.kind(), "MemoryError") == 0) {
    PyErr_SetString(PyExc_MemoryError, error.what());
    return;
  }
  const py::object type = py::module_::import("pycoll._C").attr("EngineError");
  PyErr_SetObject(type.ptr(), py::make_tuple(error.kind(), error.what()).ptr());
}

bool check_signals(void*) {
  if (interpreter_is_ending()) return false;
  went_away_ns = now_ns();
  py::gil_scoped_acquire gil;
  came_back_ns = now_ns();
  return PyErr_CheckSignals() != 0;
}

Binding make_binding(std::shared_ptr<Plan> plan, const py::kwargs& numbers) {
  const auto number = [&](const char* name) { return numbers[name].cast<uint64_t>(); };
  Binding binding;
  binding.plan = std::move(plan);
  const auto dtype = number("dtype");
  binding.dtype = dtype < kDTypeCount ? static_cast<DType>(dtype) : DType::kUInt8;
  binding.op = static_cast<ReduceOp>(number("op"));
  binding.elem_bytes = static_cast<uint32_t>(number("itemsize"));
  binding.count = number("count");
  binding.chunk = number("chunk");
  binding.descriptor = number("descriptor");
  if (numbers.contains("check")) binding.check = static_cast<uint32_t>(number("check"));
  binding.in_layout = static_cast<Layout>(number("layout_in"));
  binding.out_layout = static_cast<Layout>(number("layout_out"));
  binding.scale_n = static_cast<uint32_t>(number("scale_n"));
  binding.scale_at_exit = numbers["scale_at_exit"].cast<bool>();
  const py::object extents = numbers["extents"];
  if (!extents.is_none()) {
    const auto tables = extents.cast<std::array<Table, 4>>();
    binding.in_table = make_table(tables[0], tables[1]);
    binding.out_table = make_table(tables[2], tables[3]);
  }
  return binding;
}

}  // namespace pycoll

PYBIND11_MODULE(_C, m) {
  using namespace pycoll;
  using namespace pybind11::literals;
  m.doc() = "The engine of pycoll.";
  m.attr("EngineError") = py::reinterpret_steal<py::object>(
      PyErr_NewException("pycoll._C.EngineError", PyExc_RuntimeError, nullptr));
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Error& error) {
      raise_in_python(error);
    }
  });
  m.def("fold_isa", &isa_name);
  bind_arrays(m);
  bind_memory(m);
  bind_kernels(m);
  bind_atomics(m);
  bind_message_engine(m);
  m.def("sizes",
        [] { return py::make_tuple(sizeof(Instr), sizeof(Operand), kDTypeCount, kReduceOpCount); });
  OwnedClass<Plan>(m, "Plan").def(py::init(&make_plan), "code"_a, "operands"_a, "world_size"_a,
                                  "rank"_a, "chunks"_a, "slots"_a, "rounds"_a, "direct"_a,
                                  "messages"_a = false);
  OwnedClass<BoundCall>(m, "BoundCall")
      .def_property_readonly("direct", [](const BoundCall& call) { return call.plan->direct; })
      .def_property_readonly("descriptor", [](const BoundCall& c) { return c.descriptor; })
      .def_property_readonly("count", [](const BoundCall& c) { return c.count; });
  bind_control(m);
  OwnedClass<TraceBell>(m, "TraceBell")
      .def(made<TraceBell>())
      .def("wait", &TraceBell::wait, "seen"_a, "us"_a, Release())
      .def("ring", &TraceBell::ring);
  OwnedClass<Trace>(m, "Trace")
      .def(py::init([](size_t capacity, uintptr_t begin, uintptr_t end,
                       std::shared_ptr<TraceBell> bell) {
             const Marks marks{reinterpret_cast<decltype(Marks::begin)>(begin),
                               reinterpret_cast<decltype(Marks::end)>(end)};
             return std::make_shared<Trace>(capacity, marks, std::move(bell));
           }),
           "capacity"_a, "begin"_a = 0, "end"_a = 0, "bell"_a = nullptr)
      .def_property_readonly("lost", &Trace::lost)
      .def_property_readonly("empty", &Trace::empty)
      .def(
          "write",
          [](Trace& trace, int file) {
            int error = 0;
            {
              const Unlocked unlocked;
              error = trace.write(file);
            }
            if (error == 0) return;
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
            throw py::error_already_set();
          },
          "file"_a)
      .def("counts",
           [](const Trace& trace) {  // rows of descriptor and what CallCounts has
             py::list rows;
             for (const auto& [descriptor, c] : trace.counts()) {
               rows.append(py::make_tuple(descriptor, c.calls, c.elements, c.failed, c.total_ns,
                                          c.waited_ns, c.by_time));
             }
             return rows;
           })
      .def_property_readonly_static("up_to_ns",
                                    [](const py::object&) { return CallCounts::kUpToNs; });
  OwnedClass<Engine> engine(m, "Engine");
  add_engine_methods<Engine>(m, engine);
  engine.def(py::init(&make_engine), "control"_a, "heap"_a, "rank"_a, "timeout_s"_a, "threads"_a)
      .def(
          "bind",
          [](const Engine& e, std::shared_ptr<Plan> plan, bool across, bool input_only,
             std::shared_ptr<BoundCall> alternative, const py::kwargs& numbers) {
            Binding binding = make_binding(std::move(plan), numbers);
            binding.across = across;
            binding.input_only = input_only;
            binding.alternative = std::move(alternative);
            return e.bind(std::move(binding));
          },
          "plan"_a, "across"_a = false, "input_only"_a = false, "alternative"_a = nullptr)
      .def("reads", &Engine::reads)
      .def(
          "run",
          [](Engine& e, const BoundCall& call, uintptr_t in, uintptr_t out, uint32_t site,
             double timeout_s, std::shared_ptr<Detours> detours) {
            e.run(call, pointer(in), pointer(out), site, timeout_s, std::move(detours));
          },
          "call"_a, "x"_a, "out"_a, "site"_a, "timeout_s"_a, "detours"_a = nullptr, Release())
      .def(
          "submit",
          [](Engine& e, std::shared_ptr<BoundCall> call, uintptr_t in, uintptr_t out, uint32_t site,
             double timeout_s, std::shared_ptr<Detours> detours) {
            return e.submit(std::move(call), pointer(in), pointer(out), site, timeout_s,
                            std::move(detours));
          },
          "call"_a, "x"_a, "out"_a, "site"_a, "timeout_s"_a, "detours"_a = nullptr, Release())
      .def("trace", &Engine::trace, "trace"_a, Release())
      .def(
          "hold", [](Engine& e) { return std::shared_ptr<Use>(e.hold()); }, py::keep_alive<0, 1>())
      .def("drain", &Engine::drain, Release())
      .def(
          "check_peers", [](Engine& e) { e.check(kNoRank, Pulse::kYield); }, Release())
      .def("report", [](Engine& e) { return report_of(e, rank_report); });
  bind_address_call(m);
  bind_program_places(m);
  add_fastcall(m);
  add_caller(m);
  add_method(m);
  add_plans(m);
  add_message_work(m);
  bind_p2p(m);
}

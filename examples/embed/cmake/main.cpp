// The declarations are C++17; who owns a context is a matter of one small class.
#include <ddl.h>
#include <iostream>
#include <memory>
#include <vector>

struct Finalize {
    void operator()(ddl_context *c) const { ddl_finalize(&c); }
};

int main() {
    ddl_context *raw = nullptr;
    if (ddl_init(nullptr, &raw) != DDL_OK) {
        return 1;
    }
    std::unique_ptr<ddl_context, Finalize> context(raw);
    ddl_group *world = ddl_world(context.get());
    std::vector<double> measured(3, 2.0 * ddl_rank(world));
    ddl_tensor view = ddl_tensor_1d(measured.data(), DDL_F64, 3);
    if (ddl_all_reduce(world, view, view, DDL_AVG) != DDL_OK) {
        std::cerr << ddl_error(context.get()) << '\n';
        return 1;
    }
    std::cout << "average " << measured[2] << '\n';
}

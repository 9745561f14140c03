// Runs a call with a score_mod on the emulator: `function_driver FILE SCHEDULE`. FILE has a Header, then the arrays in
// the order in which they are read here; the results replace those that come last. test_score_function.py writes it.
//
// The source of the function, which test_score_function.py prints, comes before this one in a translation unit.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

struct Header {
    int dtype, batch_size, nheads, nheads_k, seqlen_q, seqlen_k, head_dim, window_left, window_right, has_sinks;
    int mask_bits;  // units of a block mask that have bits, or -1 without one
    int captured_bytes[4], captured_sizes[4][4];
    float softmax_scale;
};

struct File {
    std::vector<char> bytes;
    size_t at = 0;

    template <typename T = void> T *next(size_t size) {
        T *x = reinterpret_cast<T *>(&bytes[at]);
        at += (size + 127) / 128 * 128;  // as allocations are aligned
        if (at > bytes.size()) throw std::runtime_error("the file is too short");
        return x;
    }
};

int main(int argc, char **argv) try {
    if (argc != 3) throw std::runtime_error("usage: function_driver FILE --late=2");
    const std::string schedule = argv[2];
    const unsigned seed = std::stoul(schedule.substr(schedule.find('=') + 1));
    emulator::schedule = {schedule.starts_with("--early")  ? emulator::Mode::kEarly
                          : schedule.starts_with("--late") ? emulator::Mode::kLate
                                                           : emulator::Mode::kRandom,
                          seed};
    emulator::gpu = {.num_sms = int(seed % 4) + 1};
    std::ifstream in(argv[1], std::ios::binary);
    File file;
    const std::vector<char> read{std::istreambuf_iterator<char>(in), {}};
    file.bytes.resize(read.size() + 128);
    file.at = 128 - uintptr_t(file.bytes.data()) % 128;
    const size_t begin = file.at;
    std::copy(read.begin(), read.end(), file.bytes.begin() + begin);

    const Header &x = *file.next<Header>(sizeof(Header));
    AttnBackwardParams p{};
    Captured captured[4] = {};
    p.dtype = DType(x.dtype), p.batch_size = x.batch_size, p.nheads = x.nheads, p.nheads_k = x.nheads_k;
    p.seqlen_q = x.seqlen_q, p.seqlen_k = x.seqlen_k, p.head_dim = p.head_dim_v = x.head_dim;
    p.softmax_scale = x.softmax_scale;
    p.set_window(x.window_left, x.window_right);
    p.lse_batch_stride = int64_t(p.nheads) * p.seqlen_q;
    const size_t rows = p.batch_size * p.lse_batch_stride;
    auto tensor = [&](int heads, int length) {
        return Tensor{file.next(size_t(2) * p.batch_size * heads * length * p.head_dim),
                      int64_t(heads) * length * p.head_dim, int64_t(length) * p.head_dim, p.head_dim};
    };
    p.q = tensor(p.nheads, p.seqlen_q), p.k = tensor(p.nheads_k, p.seqlen_k), p.v = tensor(p.nheads_k, p.seqlen_k);
    p.dout = tensor(p.nheads, p.seqlen_q);
    void *sinks = file.next(4 * p.nheads);
    if (x.has_sinks) p.sinks = sinks;
    if (x.mask_bits >= 0) {  // one for all samples and heads
        BlockMask &mask = p.block_mask;
        mask.samples = mask.heads = 1, mask.rows = (p.seqlen_q + 63) / 64, mask.keys = (p.seqlen_k + 63) / 64;
        mask.num_bits = x.mask_bits;
        mask.units = file.next<int>(4 * mask.rows * mask.keys);
        mask.row_words = file.next<uint32_t>(4 * mask.rows * ((mask.keys + 31) / 32));
        mask.key_words = file.next<uint32_t>(4 * mask.keys * ((mask.rows + 31) / 32));
        mask.bits = file.next<uint32_t>(4 * 256 * mask.num_bits);
    }
    for (int i = 0; i < ScoreMod::kNumCaptured; i++) {
        captured[i].data = file.next(x.captured_bytes[i]);
        std::copy_n(x.captured_sizes[i], 4, captured[i].size);
    }
    std::vector<int> counters(2);
    p.tile_counter = counters.data();
    const size_t results = file.at;
    p.o = tensor(p.nheads, p.seqlen_q), p.lse = file.next(4 * rows);
    forward(p, captured);
    emulator::wait_for_kernels();

    p.dq = tensor(p.nheads, p.seqlen_q), p.dk = tensor(p.nheads_k, p.seqlen_k), p.dv = tensor(p.nheads_k, p.seqlen_k);
    for (int i = 0; i < ScoreMod::kNumCaptured; i++) {
        int size = 4;
        for (int dim = 0; dim < 4; dim++) size *= x.captured_sizes[i][dim];
        captured[i].gradient = file.next<float>(size);
    }
    std::vector<float> delta(rows), lse_log2(rows);
    p.delta = delta.data(), p.lse_log2 = lse_log2.data();
    std::vector<float> workspace(backward_workspace(p) / 4 + 64);
    p.workspace = &workspace[32 - uintptr_t(workspace.data()) % 128 / 4];
    backward(p, captured);
    emulator::wait_for_kernels();
    std::ofstream(argv[1], std::ios::binary).write(&file.bytes[results], file.bytes.size() - results);
    return 0;
} catch (const std::exception &error) {
    std::puts(error.what());
    return 1;
}

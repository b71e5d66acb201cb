// What the CPU variants work on: the tensors of a call, and its slots sorted by expert.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace moe {

constexpr int64_t kBlock = 16;                       // values that share a scale
constexpr int64_t kRows = 16;                        // rows of weights that lie together, a group
constexpr int64_t kBlockBytes = kRows * kBlock / 2;  // of codes: the group's rows of one block
constexpr float kLimit = 10.0f;                      // of the clamp

// One of the products: groups of rows one behind the other, in each the blocks along `width`.
struct Matrix {
    const uint8_t* codes;    // (experts, rows / kRows, width / 8, kRows, 4): a row's next 8 codes as 4 bytes
    const uint8_t* scales;   // (experts, rows / kRows, width / kBlock, kRows), e4m3
    const float* factor;     // (experts,), of all weights of an expert
    const float* in_factor;  // (experts,), of its activations where they are quantised
    int64_t rows, width;

    int64_t blocks() const { return width / kBlock; }
    const uint8_t* group_codes(int64_t expert, int64_t group) const {
        return codes + (expert * (rows / kRows) + group) * blocks() * kBlockBytes;
    }
    const uint8_t* group_scales(int64_t expert, int64_t group) const {
        return scales + (expert * (rows / kRows) + group) * blocks() * kRows;
    }
};

struct Problem {
    Matrix w13;             // groups 2 i and 2 i + 1 are gate and up of the inner values 16 i to 16 i + 15
    Matrix w2;              // rows are hidden values
    const uint16_t* x;      // bf16 (tokens, hidden)
    const int32_t* ids;     // (tokens, topk)
    const float* routing;   // (tokens, topk)
    uint16_t* out;          // bf16 (tokens, hidden)
    int64_t tokens, experts, topk, hidden, inner;
    bool quantised;         // activations "nvfp4"

    // A launcher's arguments: codes, scales, factors and factors of activations of w13, then of w2, then the tensors of
    // Inputs and Outputs; the numbers of task.Sizes.
    Problem(void* const* t, const int64_t* sizes)
        : w13(matrix(t, 2 * sizes[4], sizes[3])),
          w2(matrix(t + 4, sizes[3], sizes[4])),
          x(static_cast<const uint16_t*>(t[8])),
          ids(static_cast<const int32_t*>(t[9])),
          routing(static_cast<const float*>(t[10])),
          out(static_cast<uint16_t*>(t[11])),
          tokens(sizes[0]),
          experts(sizes[1]),
          topk(sizes[2]),
          hidden(sizes[3]),
          inner(sizes[4]),
          quantised(sizes[5]) {}

    int64_t slots() const { return tokens * topk; }

  private:
    static Matrix matrix(void* const* t, int64_t rows, int64_t width) {
        return {static_cast<const uint8_t*>(t[0]),
                static_cast<const uint8_t*>(t[1]),
                static_cast<const float*>(t[2]),
                static_cast<const float*>(t[3]),
                rows,
                width};
    }
};

// Some slots of one expert, which meet its weights together: order[first] to order[first + count - 1].
struct Panel {
    int64_t expert, first, count;
};

// Panels of one expert that belong together in a task: [first, last).
struct Band {
    int64_t first, last;
};

// Slots t * topk + j by expert, those of none last, and how they are cut: only by their numbers, whatever the threads.
struct Routing {
    std::vector<int32_t> order;
    int64_t routed;  // of them have an expert
    std::vector<Panel> panels;
    std::vector<Band> bands;

    // At most `most` slots in a panel, and band_panels panels in a band. Whether every id is an expert's or -1.
    bool fill(const Problem& p, int64_t most, int64_t band_panels) {
        const auto expert = [&](int64_t s) { return p.ids[s] == -1 ? p.experts : p.ids[s]; };
        std::vector<int64_t> start(p.experts + 2);
        for (int64_t s = 0; s < p.slots(); s++) {
            if (p.ids[s] < -1 || p.ids[s] >= p.experts) return false;
            start[expert(s) + 1]++;
        }
        for (int64_t e = 0; e < p.experts; e++) start[e + 1] += start[e];
        routed = start[p.experts];
        order.resize(p.slots());
        std::vector<int64_t> next(start.begin(), start.end() - 1);
        for (int64_t s = 0; s < p.slots(); s++) order[next[expert(s)]++] = static_cast<int32_t>(s);
        for (int64_t e = 0; e < p.experts; e++) {
            const int64_t slots = start[e + 1] - start[e], pieces = (slots + most - 1) / most;
            for (int64_t i = 0; i < pieces; i++) {
                if (i % band_panels == 0) bands.push_back({static_cast<int64_t>(panels.size()), 0});
                const int64_t first = i * slots / pieces;  // all about as large
                panels.push_back({e, start[e] + first, (i + 1) * slots / pieces - first});
                bands.back().last = static_cast<int64_t>(panels.size());
            }
        }
        return true;
    }
};

}  // namespace moe

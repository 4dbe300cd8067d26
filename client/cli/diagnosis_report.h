// The report of `rapt diagnose` and `rapt cache diagnose`.
#ifndef RAPT_CLIENT_CLI_DIAGNOSIS_REPORT_H_
#define RAPT_CLIENT_CLI_DIAGNOSIS_REPORT_H_

#include "rapt/reports.h"

namespace rapt {

// Print to standard output.
void Print(const client::Diagnosis& diagnosis);
void PrintJson(const client::Diagnosis& diagnosis);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_DIAGNOSIS_REPORT_H_
